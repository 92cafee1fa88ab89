// The hashes of gids. Called by the hash tables of the host and of the kernels, and where a random number is a function
// of a counter.
#pragma once

#include "gids/target.h"

namespace gids {

// Numbers that look random, one to one: the finaliser of SplitMix64.
GIDS_HD constexpr u64 mix(u64 z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// Where the search for a key starts, in a table of 2^log2_slots; log2_slots is 1 to 32.
//
// One multiplication would do for ids without a pattern. But ids have one: those of one rank are chosen by a
// multiplication (gids/distributed/owners.py), and would fill one stretch of the table, where each search passes all of
// them. The shift between two multiplications breaks such patterns, and those of ids with a stride. mix() would, too;
// it makes relabelling a minibatch a third slower.
GIDS_HD constexpr u32 home_slot(u64 key, u32 log2_slots) {
  key *= 0xBF58476D1CE4E5B9ull;
  key ^= key >> 32;
  return static_cast<u32>(key * 0x94D049BB133111EBull >> (64 - log2_slots));
}

}  // namespace gids
