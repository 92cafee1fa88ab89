// Random walks with restart on the host: a node's neighbors are those that short walks from it visit most (PinSAGE).
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

// counts: by layer, the seeds' first: the number of most visited nodes that become neighbors. There is one block in a
// layer, between nodes of the path's type; its weights are shares of the visits, its positions are -1.
Minibatch sample_walks(HostSampler& host, const Topology& graph, Seeds seeds, std::span<const std::vector<int>> counts,
                       const WalkOptions& options, const Moment& moment);

// The same step by step, for walks over a graph whose edges several processes have.

// Of each walk: where it began, and the number of the draw, as sample_walks counts them.
struct WalkDraws {
  std::span<const i64> starts, numbers;
};

// One hop of each walk by a relation: out gets the next nodes, or -1 in a dead end. Throws BadTopology.
void hop_walks(const Topology& graph, u32 relation, const Moment& moment, u32 layer, const WalkDraws& draws,
               std::span<const i64> nodes, i64* out);
// Whether each walk goes back to its start.
void restart_walks(const Moment& moment, u32 layer, const WalkDraws& draws, double restart, bool* out);
// The neighbors that visits make. visited: `each` for every node, in order; -1: none. sources, shares: room for all
// visits. Returns their number.
u64 rank_walks(std::span<const i64> visited, size_t each, size_t most, i64* indptr, i64* sources, float* shares);

}  // namespace gids::sampler
