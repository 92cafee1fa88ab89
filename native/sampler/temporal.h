// Neighbors that are not later than the seed. A destination's in-edges are in the order of their times, so that a
// binary search bounds them; that they are is checked when a dataset is verified, and in Python for other graphs.
// Called by neighbor.cpp.
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

}  // namespace gids::sampler
