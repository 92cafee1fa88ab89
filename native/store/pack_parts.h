// Gives nodes to the parts of a dataset so that every part has about the same of several loads (rows, training seeds,
// in-edges), and few edges lead from one part to another. Called by bind/; knows arrays only.
//
// Weights are float[count][loads]: of a cluster or a node. Loads of parts are double[parts][loads].
#pragma once

#include <cstddef>
#include <span>

#include "gids/target.h"

namespace gids::store {

constexpr u16 no_part = 0xffff;

// weights[labels[i]][load] += values[i], i < n.
void add_weights(const u32* labels, const float* values, size_t n, size_t load, size_t load_count,
                 float* weights) noexcept;

// Gives each item, in this order, to the part that is best for the balance of all loads. Items without weight, those
// with more than `most` of the total of a load, and those that have a part keep what parts has. loads is advanced.
void pack(const u32* order, size_t n, const float* weights, std::span<const double> totals, double most, u32 part_count,
          double* loads, u16* parts);

// One pass over nodes: each moves to the part of most of its in-neighbors if no load there exceeds `most` times the
// mean. Returns how many moved, or ~0 for a damaged topology. Of a node with many in-edges a spread sample votes.
template <class Index>
size_t refine(const i64* indptr, const Index* indices, size_t edge_count, size_t node_count, const float* weights,
              std::span<const double> totals, double most, u32 part_count, double* loads, u16* parts);

}  // namespace gids::store
