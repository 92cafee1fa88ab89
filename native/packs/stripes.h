// Where the bytes of a scratch file are: in stripes over one file in each scratch directory. Used by the writer and by
// reads of packs.
#pragma once

#include <cstddef>

#include "cache/memory.h"

namespace gids::packs {

// The most that a write buffer has: a write goes to one disk, or two.
inline constexpr u64 stripe_bytes = 1u << 20;

struct Stripes {
  struct Place {
    u32 file;
    u64 offset;  // in that file
    u64 room;    // bytes to the end of the stripe
  };
  u32 files = 1;

  Place at(u64 offset) const {
    if (files == 1) return {0, offset, ~u64{0}};
    const u64 stripe = offset / stripe_bytes, within = offset % stripe_bytes;
    return {static_cast<u32>(stripe % files), stripe / files * stripe_bytes + within, stripe_bytes - within};
  }
};

}  // namespace gids::packs
