// Orders of rows: where each row of a table lies, which rows should lie together, and moving rows to their
// places. Called by bind/. Knows no pages' checksums and no files' layout beyond what it is told.
#pragma once

#include <cstddef>

#include "gids/target.h"

namespace gids::store {

// out[i] = order[ids[i]]; an id outside [0, row_count) stays as it is, for whoever checks ids to find.
template <class Position>
void to_positions(const Position* order, u64 row_count, const i64* ids, size_t n, i64* out) noexcept;

// Adds weights[i] to sums[order[i] / rows_per_page], i < n. Returns n, or the first i whose page there is not.
template <class Position>
size_t sum_by_page(const Position* order, const float* weights, size_t n, u64 rows_per_page, float* sums,
                   size_t page_count) noexcept;

// Sets marks[order[i] - first] of every position in [first, first + count); returns n, or the first i whose
// position is negative, row_count or more, or marked already.
template <class Position>
size_t mark_positions(const Position* order, size_t n, i64 row_count, i64 first, size_t count, u8* marks) noexcept;

constexpr size_t bad_topology = ~size_t{0};

// One round of label propagation: each node takes the label that most of its in-neighbors have, of clusters
// with room. Returns how many nodes moved, or bad_topology. Of a node with many in-edges a spread sample votes.
template <class Index>
size_t propagate_labels(const i64* indptr, const Index* indices, size_t edge_count, size_t node_count, u32* labels,
                        u32* sizes, u32 most, u64 seed);

// Nodes that are alone join the cluster of a node that they point to. Returns how many, or bad_topology.
template <class Index>
size_t adopt_lone(const i64* indptr, const Index* indices, size_t edge_count, size_t node_count, u32* labels,
                  u32* sizes, u32 most) noexcept;

// All nodes by falling weight, equals in their order. Weights above 65535 are equal. nodes: u32[n].
void by_weight(const u32* weights, size_t n, u32* nodes);

// Nodes come by falling weight: each gets the next place of its cluster. ranks: of each label, which cluster it is;
// starts: of each cluster, advanced. Positions go to order.
template <class Position>
void place_in_clusters(const u32* nodes, size_t n, const u32* labels, const u32* ranks, u64* starts,
                       Position* order) noexcept;

// Records of a scattered file: a row's place within its bucket (u32), and the row.
constexpr size_t slot_bytes = sizeof(u32);

// Appends rows, of row_bytes each, to the buckets that their positions lie in: bucket b holds the positions
// [b * bucket_rows, (b + 1) * bucket_rows), as records from the first's place on. filled: records of each bucket so
// far, advanced. Returns 0 or errno; EINVAL for a position without a bucket, or with no room there.
int scatter_rows(int fd, const std::byte* rows, size_t row_bytes, const i64* positions, size_t n, u64 bucket_rows,
                 u64 row_count, u64* filled);

// Puts a bucket's records in their places: out[slot] = row. Returns whether the slots were 0 ... n - 1, each once.
bool place_rows(const std::byte* records, size_t n, size_t row_bytes, std::byte* out);

}  // namespace gids::store
