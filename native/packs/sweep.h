// One ascending pass over tables, in large reads, that copies every wanted row to the packs that want it: into memory,
// or to a scratch file by way of a Writer. Called by bind/. Runs in a thread of its own. Knows rows, pages and files;
// knows nothing of minibatches.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "cache/geometry.h"
#include "cache/memory.h"
#include "cache/workers.h"
#include "io/engine.h"
#include "packs/row_list.h"
#include "packs/stripes.h"
#include "packs/writer.h"

namespace gids::packs {

// Who may read the disk: a sweep to scratch waits between two pieces while a pack that is due is being read or swept.
class Priority {
 public:
  void begin_urgent();
  void end_urgent();
  // Waits until nothing urgent is going on. Looks at `stop` ten times a second.
  void yield(const std::atomic<bool>& stop);

 private:
  std::mutex mutex_;
  std::condition_variable cv_;
  u32 urgent_ = 0;
};

// Something urgent, from construction to destruction.
class Urgent {
 public:
  explicit Urgent(std::shared_ptr<Priority> priority) : priority_(std::move(priority)) { priority_->begin_urgent(); }
  ~Urgent() { priority_->end_urgent(); }
  Urgent(const Urgent&) = delete;
  Urgent& operator=(const Urgent&) = delete;

 private:
  std::shared_ptr<Priority> priority_;
};

// Where the rows of one pack, or the resident rows, go: one after the other to memory, or from `offset` on to the
// writer's file.
struct Target {
  std::shared_ptr<const RowList> rows;
  std::byte* memory = nullptr;  // null: to the file
  u64 offset = 0;
};

struct TableSweep {
  cache::Geometry geometry;
  std::span<const u32> checksums;  // CRC32C of each page; empty: not compared
  std::vector<Target> targets;     // over the table's rows
};

// A page that could not be read. Its rows are arbitrary in every target.
struct BadPage {
  u32 file;
  u64 offset;
  int error;  // errno; EBADMSG: wrong checksum
};

struct SweepOptions {
  u32 piece_bytes = 1u << 20;  // read by requests of the engine's max_read_bytes
  u32 pieces = 8;              // of this length, or more shorter ones, in memory
  u32 gap_bytes = 16u << 10;   // unwanted bytes that are read rather than skipped
  u32 threads = 1;             // that copy rows
};

class Sweep {
 public:
  // Starts at once. writer: may be null if every target is in memory. Throws std::invalid_argument for a page
  // longer than piece_bytes.
  Sweep(std::shared_ptr<io::Engine> engine, std::shared_ptr<Writer> writer, std::shared_ptr<Priority> priority,
        std::vector<TableSweep> tables, const SweepOptions& options);
  ~Sweep();  // cancels
  Sweep(const Sweep&) = delete;
  Sweep& operator=(const Sweep&) = delete;

  bool wait_for(u32 timeout_ms);
  void cancel();  // returns at once, and drops what waits to be written; wait_for() then becomes true soon
  // The rest only once wait_for() was true.
  int error() const { return error_; }  // 0, ECANCELED, or why the writer failed
  const std::vector<BadPage>& bad_pages() const { return bad_pages_; }
  u64 bytes_read() const { return bytes_read_; }
  u64 busy_ns() const { return busy_ns_; }
  size_t memory_bytes() const { return memory_.bytes(); }

 private:
  struct Piece;
  struct Output;
  struct Ring;
  class WantedPieces;
  void run() noexcept;
  void sweep(const TableSweep& table);
  void submit(const cache::Geometry& geometry, Piece& piece);
  void repair(const TableSweep& table, Piece& piece);
  void distribute(const TableSweep& table, const std::deque<Piece>& reading, size_t pieces,
                  std::vector<Output>& outputs);

  std::shared_ptr<io::Engine> engine_;
  std::shared_ptr<Writer> writer_;
  std::shared_ptr<Priority> priority_;
  std::optional<Urgent> urgent_;  // while rows go to memory
  std::vector<TableSweep> tables_;
  const SweepOptions options_;
  HugeArray<std::byte> memory_;
  cache::Workers workers_;
  std::atomic<bool> stop_{false};
  std::vector<const std::byte*> found_;  // rows of the present pieces that one target wants
  std::vector<BadPage> bad_pages_;
  u64 bytes_read_ = 0, busy_ns_ = 0;
  int error_ = 0;
  std::mutex mutex_;
  std::condition_variable cv_;
  bool ended_ = false;
  std::thread thread_;
};

// Reads one contiguous piece of a file into memory, as an urgent read. The reads are in flight until wait_for() is
// true. stripes: over which files, from `file` on, the piece is striped.
class PackRead {
 public:
  struct Bad {
    u64 begin, end;  // bytes of the piece, from 0
    int error;
  };

  PackRead(std::shared_ptr<io::Engine> engine, std::shared_ptr<Priority> priority, u32 file, u64 offset, std::byte* to,
           u64 bytes, Stripes stripes = {});
  ~PackRead();  // cancels, and waits for reads in flight
  PackRead(const PackRead&) = delete;
  PackRead& operator=(const PackRead&) = delete;

  bool wait_for(u32 timeout_ms);
  std::vector<Bad> bad() const;  // once wait_for() was true
  u64 busy_ns() const;

 private:
  class Reads;
  std::shared_ptr<io::Engine> engine_;
  std::shared_ptr<Reads> reads_;
};

}  // namespace gids::packs
