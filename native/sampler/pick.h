// Draws the sampled positions of a few nodes at once, so that the processor computes their random numbers side by
// side. Called by neighbor.cpp; touches no graph.
#pragma once

#include "gids/neighbor.h"
#include "sampler/draws.h"

namespace gids::sampler {

constexpr u32 pick_lanes = draw_lanes;

// Nodes that have more neighbors than the fanout, and where the positions of their sampled edges go.
struct Picks {
  u32 count = 0;
  u64 node[pick_lanes], degree[pick_lanes];
  i64 begin[pick_lanes];
  i64* to[pick_lanes];
};

// Writes `fanout` positions, begin + offset each, in the order of the draws. fanout >= 1.
void pick(const Picks& picks, u64 layer_key, u32 fanout);

}  // namespace gids::sampler
