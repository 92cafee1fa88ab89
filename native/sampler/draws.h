// Random numbers of many nodes at once, so that the processor computes them side by side. Called by pick.cpp and
// variates.cpp; touches no graph.
#pragma once

#include "gids/random.h"

namespace gids::sampler {

constexpr u32 draw_lanes = 32;
using Lanes = u64[draw_lanes];

// Draws 2 i and 2 i + 1 of each node.
using DrawPairs = u64[2][draw_lanes];
void draw_pairs(const Lanes& node, u64 key, u32 i, DrawPairs& out);

// random::node_number of node[0 .. count), count <= draw_lanes. What lies behind is read and written up to the next
// multiple of 8.
void node_numbers(const Lanes& node, u32 count, u64 key, Lanes& out);
// Which of these are below the limit, a bit each.
u32 numbers_below(const Lanes& node, u32 count, u64 key, u64 limit);

}  // namespace gids::sampler
