// What the passes over a superbatch's uses have in common: a step's uses in slices, a thread each.
#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

#include "cache/workers.h"
#include "packs/uses.h"

namespace gids::packs {

constexpr u64 rows_ahead = 16;  // uses: the state of a row is a cache miss each

// Ends passes, or a sweep, from another thread.
struct Cancel {
  std::atomic<bool> wanted{false};
};

// Called once a step, by the thread that runs the passes. May throw, which ends them.
using Check = std::function<void()>;

// Some uses of a step, and what a pass finds out about them.
struct Slice {
  u32 number = 0;
  u64 begin = 0;  // the first of the step's uses
  std::vector<u32> rows;
  std::vector<u16> notes;

  size_t size() const { return rows.size(); }
};

class Team {
 public:
  explicit Team(cache::Workers& workers) : workers_(workers), slices_(workers.threads()) {}

  u32 threads() const { return workers_.threads(); }

  // Calls f(number) for each of `count`, several at a time. Throws what the first of them threw that did.
  template <class F>
  void run(u32 count, const F& f) {
    std::exception_ptr failure;
    std::mutex mutex;
    workers_.parallel_for(count, 1, [&](size_t begin, size_t end, u32) {
      for (size_t i = begin; i < end; ++i) {
        try {
          f(static_cast<u32>(i));
        } catch (...) {
          std::lock_guard lock(mutex);
          if (!failure) failure = std::current_exception();
        }
      }
    });
    if (failure) std::rethrow_exception(failure);
  }

  // Reads a step's rows, and its notes if asked to, in slices, and calls f(slice) for each, several at a time. Returns
  // their number.
  template <class F>
  u32 in_slices(const Uses& uses, u32 step, bool notes, const F& f) {
    const u64 size = uses.size(step);
    const u32 count = static_cast<u32>(std::clamp<u64>(size / least_uses, 1, threads()));
    run(count, [&](u32 number) {
      Slice& s = slices_[number];
      s.number = number;
      s.begin = size * number / count;
      s.rows.resize(size * (number + 1) / count - s.begin);
      s.notes.resize(s.size());
      uses.read_rows(step, s.begin, s.rows);
      if (notes) uses.read_notes(step, s.begin, s.notes);
      f(s);
    });
    return count;
  }

 private:
  static constexpr u64 least_uses = 4096;  // a shorter slice is not worth waking another thread
  cache::Workers& workers_;
  std::vector<Slice> slices_;
};

}  // namespace gids::packs
