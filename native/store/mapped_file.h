// Files that are mapped for reading, and a guard for those who read them. A page that cannot be read, because of a
// device error or because the file was truncated, raises SIGBUS, which ends a process. Under a guard such a page reads
// as zeros instead, and the guard says so: what was read is then thrown away. Called by bind/, and by Workers, whose
// threads read for the caller. Knows files and addresses; nothing of what is in them.
#pragma once

#include <atomic>
#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>

#include "gids/target.h"

namespace gids::store {

struct MapSlot;

// The first bytes of a file. Any thread reads; outside a guard SIGBUS ends the process, as for any mapping.
class MappedFile {
 public:
  // fd: duplicated. path: for errors. Throws std::system_error.
  MappedFile(int fd, u64 bytes, std::string path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::byte* data() const;
  u64 bytes() const { return bytes_; }
  int fd() const;

 private:
  const u64 bytes_;
  MapSlot* slot_;
};

// A page of a mapped file that could not be read.
struct MapFault : std::runtime_error {
  MapFault(int error, const std::string& reason, std::string path, u64 offset)
      : std::runtime_error(reason), error(error), path(std::move(path)), offset(offset) {}
  int error;  // errno; ENODATA: the file ends before the offset
  std::string path;
  u64 offset;
};

// This thread may read mapped files, from construction to destruction; guards nest. Between two of them a page that
// could not be read is tried again.
class MapGuard {
 public:
  MapGuard();
  ~MapGuard();
  MapGuard(const MapGuard&) = delete;
  MapGuard& operator=(const MapGuard&) = delete;

  // Whether a page of any mapped file could not be read meanwhile, by any thread: this one may have read its zeros.
  bool failed() const;
  // Whether it was this thread, or one that joined it.
  bool met_fault() const { return met_.load(std::memory_order_relaxed) != nullptr; }
  [[noreturn]] void raise() const;  // MapFault, once failed()
  void check() const {
    if (failed()) raise();
  }

  // Makes sure that the signal comes to us: others may have installed a handler since. Before a guard, in a call from
  // Python.
  static void prepare();

  static MapGuard* current();
  // From construction to destruction this thread reads for the thread that has the guard; null: for none.
  class Join {
   public:
    explicit Join(MapGuard* guard);
    ~Join();
    Join(const Join&) = delete;
    Join& operator=(const Join&) = delete;

   private:
    MapGuard* const before_;
  };

 private:
  friend bool absorb_fault(std::size_t address);
  MapGuard* const before_;
  u64 seen_;  // faults before this guard, whose pages were tried again
  std::atomic<MapSlot*> met_{nullptr};
};

// f(), which reads mapped files, may be called several times: once more if another thread met a fault, because this one
// may have read the zeros in its place. Throws MapFault in place of what f throws about zeros.
template <class F>
auto read_mapped(const F& f) {
  constexpr int tries = 3;
  for (int left = tries;; --left) {
    MapGuard guard;
    try {
      auto result = f();
      if (!guard.failed()) return result;
    } catch (...) {
      if (!guard.failed()) throw;
    }
    if (guard.met_fault() || left == 1) guard.raise();
  }
}

// A value of a mapped file, such as a checksum; nothing, which equals no value, if it cannot be read. Any thread.
std::optional<u32> value_at(const u32* at);

}  // namespace gids::store
