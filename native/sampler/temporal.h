// Neighbours that are not later than the seed. A destination's in-edges are in the order of their times, so that a
// binary search bounds them. Called by neighbor.cpp.
#pragma once

#include "sampler/host_sampler.h"

namespace gids::sampler {

// The times of a relation's edges: their own, or those of their sources. values: int32, or int64 if wide; null: the
// edges have none, and all are early enough.
struct Times {
  const void* values = nullptr;
  bool wide = false;
  bool of_sources = false;
};

// Leaves out the frontier's in-edges that are later than their tree. most: if it is not `no_limit`, of those left only
// so many, the last ones.
constexpr u64 no_limit = ~u64{0};
void leave_out_later(HostSampler& host, const Frontier& frontier, const Times& times, std::span<const i64> of_trees,
                     u64 most);

// Looks at the times of edges that were drawn: if one is later than its tree, in-edges are not in the order of time.
class TimeCheck {
 public:
  TimeCheck(const Frontier& frontier, const Times& times, std::span<const i64> of_trees)
      : frontier_(frontier), times_(times), of_trees_(of_trees) {}

  // Fetches what look() needs of the edges at these positions.
  void prefetch(const i64* positions, size_t count) const;
  // The edges of nodes [first, last): node v has those from indptr[v] to indptr[v + 1]. sources: ids.
  void look(size_t first, size_t last, const i64* indptr, const i64* positions, const i64* sources);
  // All in-edges that the frontier has.
  void look_at_all(HostSampler& host);
  // Throws BadTopology if one was later.
  void raise() const;

 private:
  const Frontier& frontier_;
  const Times& times_;
  std::span<const i64> of_trees_;
  FirstFault later_;
};

}  // namespace gids::sampler
