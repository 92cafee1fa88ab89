// Facts of a trace of minibatches that need no cache: the pages that a minibatch reads, and the hits of the best
// possible replacement (Belady's MIN with bypass).
// Called by bind/ for gids.bench. Knows nothing of planners, files or features.
#pragma once

#include <span>

#include "gids/target.h"

namespace gids::cache {

// Writes the pages of `ids`, each once, in order of first appearance; returns their number. marks: one per page,
// none equal to `mark` before. Throws std::out_of_range for an id without a page.
u64 unique_pages(std::span<const i64> ids, u32 rows_per_page, std::span<u32> marks, u32 mark, i64* out);

// hits[t]: pages of minibatch t that MIN with `lines` lines holds when t comes. next: for every page of every
// minibatch, one minibatch after the other, the minibatch that uses it next (ends.size() - 1: none does).
// ends: where each minibatch begins in `next`, and the end. Until minibatch `warm` nothing is dropped: from then
// on no cache that starts empty can hit more.
void min_hits(std::span<const u32> next, std::span<const i64> ends, u64 lines, u64 warm, std::span<i64> hits);

}  // namespace gids::cache
