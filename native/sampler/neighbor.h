// Neighbour sampling on the host: every destination draws for itself. Called by the bindings.
#pragma once

#include "sampler/host_sampler.h"
#include "sampler/variates.h"

namespace gids::sampler {

// By layer, the seeds' first, then by relation: 0 or more, or neighbor::all_neighbors.
using Fanouts = std::span<const std::vector<int>>;

// Uniform, without replacement. key: of the minibatch.
Minibatch sample_neighbors(HostSampler& host, const Topology& graph, Seeds seeds, Fanouts fanouts, u64 key);

}  // namespace gids::sampler
