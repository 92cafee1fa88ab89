// A map from (tree, node id) to the position where the pair first appears: id_map.h for nodes of trees. It uses open
// addressing. A slot has two 64-bit words: the key, and the least position noted. Any number of threads may note keys
// at once; the result does not depend on their order or number. The host and the CUDA kernels share this header. The
// caller owns the table and fills it with ones.
#pragma once

#include "gids/id_map.h"

namespace gids::pair_map {

constexpr u64 empty = ~u64{0};  // no key: ids are below 2^32 - 1
constexpr u32 slot_words = 2;

GIDS_HD constexpr u64 key(u64 tree, u64 id) { return tree << 32 | id; }
GIDS_HD constexpr u64 id_of(u64 key) { return key & 0xFFFFFFFF; }
GIDS_HD constexpr u64 tree_of(u64 key) { return key >> 32; }

// Notes that key appears at a position; returns its slot. The table must have an empty slot left.
GIDS_HD u32 note(u64* slots, u32 log2_slots, u64 key, u64 at) {
  for (u32 slot = home_slot(key, log2_slots);; slot = id_map::next(slot, log2_slots)) {
    local_ref<u64> ref(slots[slot_words * u64{slot}]);
    u64 held = ref.load(memory_order_relaxed);
    if (held != key && !(held == empty && id_map::exchange(ref, held, key)) && held != key) continue;
    u64& position = slots[slot_words * u64{slot} + 1];
    id_map::lower(position, local_ref<u64>(position).load(memory_order_relaxed), at);
    return slot;
  }
}

}  // namespace gids::pair_map
