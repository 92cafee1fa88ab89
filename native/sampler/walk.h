// Random walks with restart on the host: a node's neighbours are those that short walks from it visit most (PinSAGE).
// Called by the bindings. See docs/internals/sampling-methods.md.
#pragma once

#include "sampler/host_sampler.h"
#include "sampler/variates.h"

namespace gids::sampler {

struct WalkOptions {
  std::vector<u32> path;  // relations of one traversal, against their direction, from a node type back to itself
  u32 walks = 0;          // from every destination
  u32 length = 0;         // traversals of each
  double restart = 0;     // before every traversal but the first: the probability to go back to the start
};

// counts: by layer, the seeds' first: the number of most visited nodes that become neighbours. There is one block in a
// layer, between nodes of the path's type; its weights are shares of the visits, its positions are -1.
Minibatch sample_walks(HostSampler& host, const Topology& graph, Seeds seeds, std::span<const std::vector<int>> counts,
                       const WalkOptions& options, const Moment& moment);

}  // namespace gids::sampler
