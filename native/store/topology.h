// One pass over a graph's edges in memory: count sources, sort by destination, carry visits to the sources.
// Called by the converters and by gids.heat, a bounded piece at a time. Knows arrays only; ids are checked,
// never trusted.
#pragma once

#include <cstddef>

#include "gids/target.h"

namespace gids::store {

constexpr size_t all_in_range = ~size_t{0};
constexpr size_t bad_indptr = all_in_range - 1;

// counts[i - first] += 1, never past the largest u32, for each i of indices in [first, first + count).
// Returns the position of the first index outside [0, limit), or all_in_range.
template <class Index>
size_t count_sources(const Index* indices, size_t n, i64 limit, i64 first, size_t count, u32* counts) noexcept;

// Stable counting sort of n edges by destination, for destinations in [first, first + count):
// offsets[count + 1] get where each destination's edges begin, from 0. Returns as count_sources does
// (then the outputs are undefined).
size_t sort_edges(const i64* sources, const i64* destinations, const i64* ids, size_t n, i64 first, size_t count,
                  i64* offsets, i64* sorted_sources, i64* sorted_ids) noexcept;

// Stable sort by source of the edges of each of `count` destinations, whose edges are offsets[slot] to
// offsets[slot + 1] of sources and ids. offsets are sort_edges' own. Memory: 16 bytes per edge of one destination.
void sort_neighbors(const i64* offsets, size_t count, i64* sources, i64* ids);

// visits[s] += shares[v] for each in-edge of destination v from source s. Destination v of `count` has the edges
// indptr[v] to indptr[v + 1] of indices (edge_count of them). Returns the position in indices of the first source
// outside [0, source_count), bad_indptr, or all_in_range; nothing is written out of range.
template <class Index>
size_t carry_to_sources(const i64* indptr, size_t count, const Index* indices, size_t edge_count, const double* shares,
                        double* visits, size_t source_count) noexcept;

}  // namespace gids::store
