// What an offline Belady cache misses: all uses of a superbatch are known, so at every step the cache drops the rows
// whose next use is farthest. Two passes over the uses. Neither keeps a list of rows: the cache is counted by next use
// and by range of rows, and a whole count is dropped at a time. Called by plan_annex(); knows rows and steps.
#pragma once

#include <vector>

#include "packs/passes.h"

namespace gids::packs {

constexpr u64 ranges_max = 256;  // ranges of rows in which the cache is counted

// Backwards: notes the next use of every row that a step uses.
void note_next_uses(Uses& uses, Team& team, const Check& check);

// Forwards: notes which uses find the row in a cache of so many rows, from an earlier step of the superbatch. Returns
// the number of rows that each step misses.
std::vector<u64> note_misses(Uses& uses, Team& team, u64 capacity_rows, const Check& check);

}  // namespace gids::packs
