// One step of a pass in slices, a thread each. Called by the passes; knows numbers only.
#pragma once

#include <algorithm>
#include <exception>
#include <mutex>

#include "cache/workers.h"

namespace gids::packs {

class Team {
 public:
  explicit Team(cache::Workers& workers) : workers_(workers) {}

  u32 threads() const { return workers_.threads(); }
  // Slices of a step of this many uses. A short one is not worth waking other threads.
  u32 slices(u64 uses) const {
    return static_cast<u32>(std::clamp<u64>(uses / least_uses, 1, workers_.threads()));
  }
  // The first use of a slice. slice may be their number: the end of the last one.
  u64 begin(u64 uses, u32 slice) const { return uses * slice / slices(uses); }

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

 private:
  static constexpr u64 least_uses = 4096;
  cache::Workers& workers_;
};

}  // namespace gids::packs
