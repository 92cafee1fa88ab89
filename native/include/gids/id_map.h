// A map from node id to where the node first appears: open addressing, one 64-bit word per slot, any number of
// threads at once. What it holds after all have noted their ids depends neither on their order nor on their number.
// Shared by the host and the CUDA kernels; owning a table and clearing it is the caller's.
//
//     bits  0..31  at   the least position noted for the id
//     bits 32..63  id   node ids are below 2^32 - 1; all ones: the slot is empty
#pragma once

#include "gids/mix.h"
#include "gids/target.h"

namespace gids::id_map {

constexpr u64 empty = ~u64{0};
constexpr u64 max_ids = 0xFFFFFFFF;  // ids run from 0 to max_ids - 1, and so do positions

GIDS_HD constexpr u64 word(u64 id, u64 at) { return id << 32 | at; }
GIDS_HD constexpr u64 id_of(u64 word) { return word >> 32; }
GIDS_HD constexpr u64 at_of(u64 word) { return word & 0xFFFFFFFF; }

GIDS_HD constexpr u32 next(u32 slot, u32 log2_slots) {
  return (slot + 1) & static_cast<u32>((u64{1} << log2_slots) - 1);
}

GIDS_HD bool exchange(const local_ref<u64>& ref, u64& held, u64 to) {
  return ref.compare_exchange_strong(held, to, memory_order_relaxed, memory_order_relaxed);
}

// Stores `to` where it is less than what the word holds now; held: what it held before.
GIDS_HD void lower(u64& word, u64 held, u64 to) {
#if GIDS_SIMT
  if (to < held) atomicMin(&word, to);
#else
  while (to < held && !exchange(local_ref<u64>(word), held, to)) {
  }
#endif
}

// Notes that id appears at a position; returns its slot. The table must have an empty slot left.
GIDS_HD u32 note(u64* slots, u32 log2_slots, u64 id, u64 at) {
  for (u32 slot = home_slot(id, log2_slots);; slot = next(slot, log2_slots)) {
    local_ref<u64> ref(slots[slot]);
    u64 held = ref.load(memory_order_relaxed);
    if (held == empty && exchange(ref, held, word(id, at))) return slot;
    if (id_of(held) != id) continue;         // a slot never changes its id
    lower(slots[slot], held, word(id, at));  // the id is the same, so that the least word has the least position
    return slot;
  }
}

}  // namespace gids::id_map
