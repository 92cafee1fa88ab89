// The page word: everything the cache knows about one page, in 64 bits, and the only ways to change it.
// Shared by the host planner, the I/O completions and the CUDA kernels. Knows nothing of lines' contents,
// lists or files.
//
//     bits  0..23  uses    bit (step mod 24): the minibatch of that step is in the window or planned
//     bits 24..31  heat    static prior, 0..255
//     bits 32..61  line    the line that holds the page; 0 while ABSENT
//     bits 62..63  state   ABSENT, LOADING, RESIDENT
//
//     ABSENT --admit--> LOADING --publish--> RESIDENT --evict--> ABSENT
//                          \------fail------> ABSENT
//
// admit and evict: the planner only. publish and fail: only the completion that owns the line. Because
// each transition starts from a known state and a known line, each is one add: no loop, no lost update of
// the uses that others change meanwhile.
#pragma once

#include "gids/target.h"

namespace gids {

enum class PageState : u32 { absent = 0, loading = 1, resident = 2 };

namespace word {

constexpr u32 use_bits = 24;  // live steps at most: window + planned
constexpr u32 heat_levels = 256;
constexpr u32 heat_shift = 24, line_shift = 32, state_shift = 62;
constexpr u32 line_bits = state_shift - line_shift;
constexpr u64 uses_mask = (u64{1} << use_bits) - 1;
constexpr u64 line_mask = (u64{1} << line_bits) - 1;
constexpr u64 one_state = u64{1} << state_shift;
static_assert(use_bits == heat_shift && heat_shift + 8 == line_shift && line_bits == 30, "the fields fill the word");

GIDS_HD constexpr u32 uses_of(u64 w) { return static_cast<u32>(w & uses_mask); }
GIDS_HD constexpr u32 heat_of(u64 w) { return static_cast<u32>(w >> heat_shift) & (heat_levels - 1); }
GIDS_HD constexpr u32 line_of(u64 w) { return static_cast<u32>((w >> line_shift) & line_mask); }
GIDS_HD constexpr PageState state_of(u64 w) { return static_cast<PageState>(w >> state_shift); }
GIDS_HD constexpr u64 fresh(u32 heat) { return u64{heat} << heat_shift; }

// The bit of a step in `uses`.
GIDS_HD constexpr u32 use_bit(u64 step) { return u32{1} << (step % use_bits); }

// `uses` seen from `step`: bit d is the use at step + d.
GIDS_HD constexpr u32 uses_from(u32 uses, u64 step) {
  const u32 by = static_cast<u32>(step % use_bits);
  return ((uses >> by) | (uses << (use_bits - by))) & static_cast<u32>(uses_mask);
}

// Steps from `step` to the nearest use; `uses` must not be empty.
GIDS_HD constexpr u32 next_use(u32 uses, u64 step) {
  const u32 ahead = uses_from(uses, step);
#if defined(__CUDA_ARCH__)
  return static_cast<u32>(__ffs(static_cast<int>(ahead)) - 1);
#else
  return static_cast<u32>(__builtin_ctz(ahead));
#endif
}

GIDS_HD u64 load(u64& w) { return local_ref<u64>(w).load(memory_order_acquire); }

// Marks a use; returns the word before. Idempotent.
GIDS_HD u64 enter(u64& w, u32 bit) { return local_ref<u64>(w).fetch_or(bit, memory_order_relaxed); }

// Takes the mark back; returns the word after. Idempotent.
GIDS_HD u64 retire(u64& w, u32 bit) { return local_ref<u64>(w).fetch_and(~u64{bit}, memory_order_relaxed) & ~u64{bit}; }

GIDS_HD void admit(u64& w, u32 line) {
  local_ref<u64>(w).fetch_add(one_state | u64{line} << line_shift, memory_order_relaxed);
}
GIDS_HD void publish(u64& w) { local_ref<u64>(w).fetch_add(one_state, memory_order_release); }
GIDS_HD void fail(u64& w, u32 line) {
  local_ref<u64>(w).fetch_sub(one_state | u64{line} << line_shift, memory_order_relaxed);
}
GIDS_HD void evict(u64& w, u32 line) {
  local_ref<u64>(w).fetch_sub(2 * one_state | u64{line} << line_shift, memory_order_relaxed);
}

}  // namespace word
}  // namespace gids
