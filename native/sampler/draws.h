// Random numbers of many nodes, or of many draws of one node, at once, so that the processor computes them side by
// side. Called by pick.h and variates.h; touches no graph.
#pragma once

#include "gids/random.h"

namespace gids::sampler {

constexpr u32 draw_lanes = 32;

// Draws 2 i and 2 i + 1 of each node.
using DrawPairs = u64[2][draw_lanes];
void draw_pairs(const u64 (&node)[draw_lanes], u64 key, u32 i, DrawPairs& out);

// Draw 0 of nodes[0 .. count), count <= draw_lanes; what lies behind is read up to the next multiple of 8.
void draw_first(const u64 (&node)[draw_lanes], u32 count, u64 key, u64 (&out)[draw_lanes]);

}  // namespace gids::sampler
