// LABOR on the host: layer-neighbor sampling, where destinations share the random numbers of their neighbors.
// Called by the bindings. See docs/internals/sampling-methods.md for the formulas.
#pragma once

#include "sampler/host_sampler.h"
#include "sampler/neighborhood.h"
#include "sampler/variates.h"

namespace gids::sampler {

struct LaborOptions {
  static constexpr int to_convergence = -1;
  int importance_sampling = 0;    // how often the probabilities are improved, or to_convergence
  bool fixed_count = false;       // the k least numbers instead of those below a threshold
  bool layer_dependency = false;  // a node has the same number in all layers
};

class Labor {
 public:
  // Fanouts as sample_neighbors takes them. Blocks have weights.
  Minibatch sample(HostSampler& host, const Topology& graph, Seeds seeds, std::span<const std::vector<int>> fanouts,
                   const LaborOptions& options, const Moment& moment);
  size_t bytes() const;

 private:
  // LABOR-0 needs to know nothing of other destinations, and reads every in-edge once.
  Block sample_alone(HostSampler& host, const Frontier& frontier, int fanout, bool fixed_count,
                     const Variates& variates);
  Block sample_together(HostSampler& host, const Frontier& frontier, int fanout, const LaborOptions& options,
                        const Variates& variates);
  void improve(HostSampler& host, const Frontier& frontier, u64 fanout, int times);
  void solve(HostSampler& host, const Frontier& frontier, u64 fanout);

  Neighborhood neighborhood_;
  Scratch<double> pi_;      // of each source: its probability, up to the destination's factor
  Scratch<double> factor_;  // c_s, of each destination
  Scratch<double> most_;    // of each source: the greatest factor of its destinations
  Scratch<u64> bits_;       // of each source: r_t
};

}  // namespace gids::sampler
