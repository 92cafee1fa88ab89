// Which of a node's neighbors are sampled: `fanout` of them, uniformly, without replacement, by Floyd's algorithm
// (Bentley and Floyd, "A sample of brilliance", CACM 1987). Draw i is among the first degree - fanout + i + 1
// neighbors, and takes the last of them when it meets one that is drawn already. Host code runs the draws one
// after the other, a warp runs them side by side; both choose the same, in the same order.
#pragma once

#include "gids/random.h"
#include "gids/target.h"

namespace gids::neighbor {

constexpr int all_neighbors = -1;

// The number of in-edges that a node of this degree samples.
GIDS_HD constexpr u64 sampled_count(u64 degree, int fanout) {
  return fanout == all_neighbors || degree < static_cast<u64>(fanout) ? degree : static_cast<u64>(fanout);
}

// The same with replacement: the fanout, if the node has any in-edge.
GIDS_HD constexpr u64 replaced_count(u64 degree, int fanout) {
  return fanout == all_neighbors || degree == 0 ? degree : static_cast<u64>(fanout);
}

// The neighbor that draw i takes when it is drawn already. degree > fanout > i.
GIDS_HD constexpr u64 last_candidate(u64 degree, u32 fanout, u32 i) { return degree - fanout + i; }
GIDS_HD u64 candidate(u64 bits, u64 degree, u32 fanout, u32 i) {
  return random::below(bits, last_candidate(degree, fanout, i) + 1);
}

}  // namespace gids::neighbor
