// What a page is worth to the cache in device memory: the policies as arithmetic over the page word, the same
// as the host planner's. Called by the planning kernels, one thread per page or line. Knows nothing of lines'
// contents, rows or I/O.
//
// Buckets are in order of worth. 0..255 are the heat of pages without a use in the window. Above them are pages by
// their next use, the nearest one last, and those with the same next use by heat.
#pragma once

#include "gids/mix.h"
#include "gids/page_word.h"

namespace gids::score {

enum class Policy : u32 {
  lookahead = 0,   // nearest next use in the window; beyond the window, highest heat
  window_pin = 1,  // GIDS as published: pages in the window are pinned, the victim is random among the rest
  random = 2,      // the victim is random
  fixed = 3,       // "static": highest heat, whatever is used
};

// Pages with the same next use are ordered by heat, in this many classes. It matters if one minibatch fills the
// cache: then all next uses are the same, and a line that was replaced cannot be replaced again before the
// minibatches that use it have retired.
constexpr u32 use_levels = 8;
constexpr u32 buckets = word::heat_levels + word::use_bits * use_levels;
static_assert(buckets % 32 == 0, "the lanes of a warp share the buckets");
constexpr u32 free_line = buckets;       // instead of a bucket: the line holds nothing
constexpr u32 protected_line = ~u32{0};  // instead of a bucket: the line cannot be taken

GIDS_HD constexpr bool by_chance(Policy policy) { return policy == Policy::random || policy == Policy::window_pin; }

GIDS_HD constexpr u32 use_level(u32 heat) { return heat * use_levels / word::heat_levels; }

// The bucket of a page whose next use is `distance` steps after the next step.
GIDS_HD constexpr u32 of_use(u32 distance, u32 heat) {
  return word::heat_levels + (word::use_bits - 1 - distance) * use_levels + use_level(heat);
}

// The bucket by next use, then heat. `planned`: the use bits of planned steps; next_step: the first step not planned.
GIDS_HD constexpr u32 worth(Policy policy, u64 w, u32 planned, u64 next_step) {
  if (policy == Policy::lookahead) {
    const u32 window = word::uses_of(w) & ~planned;
    if (window) return of_use(word::next_use(window, next_step), word::heat_of(w));
  }
  return word::heat_of(w);
}

// The bucket of a missing page. With a random policy it wins against every line that may be replaced.
GIDS_HD constexpr u32 of_miss(Policy policy, u64 w, u32 planned, u64 next_step) {
  return by_chance(policy) ? buckets - 1 : worth(policy, w, planned, next_step);
}

// The bucket of a line that holds a page with word w. With a random policy: a random one below every miss.
GIDS_HD constexpr u32 of_line(Policy policy, u64 w, u64 line, u32 planned, u64 next_step) {
  const u32 pins = policy == Policy::window_pin ? static_cast<u32>(word::uses_mask) : planned;
  if (word::state_of(w) != PageState::resident || (word::uses_of(w) & pins)) return protected_line;
  if (by_chance(policy)) return static_cast<u32>(mix(line << 24 ^ next_step * 0x9E3779B97F4A7C15ull)) & 255;
  return worth(policy, w, planned, next_step);
}

// Drops everything in lower buckets, and this many lines and misses of the bucket itself.
struct Cut {
  u32 bucket, lines, misses;
};

// Chooses `drop` of the counted lines and misses, the least worthy first. Within the bucket of the cut, misses go
// before lines, so that no line is rewritten for an equal page. At least `drop` must be counted in buckets [first,
// end).
GIDS_HD constexpr Cut cut(const u32* lines, const u32* misses, u32 drop, u32 first = 0, u32 end = buckets) {
  for (u32 b = first; b + 1 < end; ++b) {
    const u32 here = lines[b] + misses[b];
    if (here >= drop) {
      const u32 from_misses = drop < misses[b] ? drop : misses[b];
      return {b, drop - from_misses, from_misses};
    }
    drop -= here;
  }
  const u32 from_misses = drop < misses[end - 1] ? drop : misses[end - 1];
  return {end - 1, drop - from_misses, from_misses};
}

}  // namespace gids::score
