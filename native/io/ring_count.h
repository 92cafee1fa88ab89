// How many rings an engine uses: one more while all of them are busy, reads wait and a core is free; one less again if
// the new one brought nothing. So a slow disk keeps its one ring. Called by uring.cpp about every window_ns; knows
// rates and no rings.
#pragma once

#include <algorithm>

#include "gids/target.h"

namespace gids::io {

// What happened since the last call.
struct RingLoad {
  double rate = 0;         // requests completed per second
  bool waiting = false;    // reads waited for a ring all the time
  bool busy = false;       // the threads of all rings in use were busy
  bool core_free = false;  // another thread would have a core of its own
};

class RingCount {
 public:
  static constexpr u64 window_ns = 20'000'000;

  RingCount(u32 least, u32 most) : most_(most), count_(least) {}

  u32 count() const { return count_; }
  bool fixed() const { return count_ >= most_ && !trying_; }

  // Returns the rings to use from now on. A load in which no reads waited says nothing.
  u32 look(const RingLoad& load) {
    if (!load.waiting) return count_;
    if (pause_) {
      --pause_;
    } else if (trying_) {
      trying_ = false;
      if (load.rate < before_ * (1 + least_gain / (count_ - 1))) {
        --count_;
        pause_ = patience_;
        patience_ = std::min(2 * patience_, patience_max);
      } else {
        patience_ = patience_min;
      }
    } else if (load.busy && load.core_free && count_ < most_) {
      before_ = load.rate;
      trying_ = true;
      pause_ = 1;  // until it has begun
      ++count_;
    }
    return count_;
  }

  // The system gives so many.
  void stop(u32 rings) {
    most_ = count_ = rings;
    trying_ = false;
  }

 private:
  static constexpr double least_gain = 0.3;  // of what a ring completed before
  static constexpr u32 patience_min = 16, patience_max = 1024;  // windows until the next try after one that failed

  u32 most_, count_;
  bool trying_ = false;
  double before_ = 0;  // rate without the ring that is tried
  u32 pause_ = 0, patience_ = patience_min;
};

}  // namespace gids::io
