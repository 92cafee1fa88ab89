// Neighbor sampling on the host: every destination draws for itself. Called by the bindings.
#pragma once

#include "sampler/host_sampler.h"
#include "sampler/temporal.h"
#include "sampler/variates.h"

namespace gids::sampler {

// By layer, the seeds' first, then by relation: 0 or more, or neighbor::all_neighbors.
using Fanouts = std::span<const std::vector<int>>;

struct NeighborOptions {
  bool replace = false;
  bool dependent = false;             // numbers change slowly: each in-edge has one, and the least are taken
  std::vector<const float*> weights;  // by relation, of each edge, finite and not negative; null: all alike
  // By relation, a bit for each source (the lowest of a byte first): edges from those weigh `factor` times; null: none.
  std::vector<const u8*> near;
  float factor = 1;
  bool weigh_near = true;    // whether blocks of relations with near sources have weights
  std::vector<Times> times;  // by relation, or empty: edges later than their tree are not drawn. Needs trees with times
  bool last = false;         // draw among the last edges, as many as the fanout
  bool newest = false;       // only the nodes that the layer before has found draw, by the same numbers in all layers
  bool induced = false;      // instead of blocks, one layer of all edges among the nodes
};

// Blocks of relations with near sources have weights, those of the estimate, if weigh_near says so; of the others,
// those of relations with weights.
Minibatch sample_neighbors(HostSampler& host, const Topology& graph, Seeds seeds, Fanouts fanouts,
                           const NeighborOptions& options, const Moment& moment, const Forest* forest = nullptr);

}  // namespace gids::sampler
