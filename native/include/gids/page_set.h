// A set of pages with a number for each: open addressing, empty when its keys are zero. Threads insert together;
// finding comes in a later kernel. Called by the planning and gathering kernels. Knows pages as numbers only.
#pragma once

#include "gids/mix.h"
#include "gids/target.h"

namespace gids {

struct PageSet {
  u64* keys;    // [mask + 1] page + 1, or 0: empty
  u32* values;  // [mask + 1]
  u64 mask;     // a power of two less one; more than half of the cells stay empty, so that probing ends

  static constexpr u64 none = ~u64{0};

  // True for the one thread that put the page in; `cell` is the page's in either case.
  GIDS_HD bool insert(u64 page, u64& cell) const {
    for (cell = mix(page) & mask;; cell = (cell + 1) & mask) {
      local_ref<u64> key(keys[cell]);
      u64 found = key.load(memory_order_relaxed);
      if (found == 0 && key.compare_exchange_strong(found, page + 1, memory_order_relaxed, memory_order_relaxed))
        return true;
      if (found == page + 1) return false;
    }
  }

  // The page's cell, or none.
  GIDS_HD u64 find(u64 page) const {
    for (u64 cell = mix(page) & mask;; cell = (cell + 1) & mask) {
      if (keys[cell] == page + 1) return cell;
      if (keys[cell] == 0) return none;
    }
  }
};

}  // namespace gids
