// LADIES on the host: the sources of a layer are drawn together, in proportion to their weight for the layer's
// destinations. Called by the bindings. See docs/internals/sampling-methods.md for the formulas.
#pragma once

#include "sampler/neighborhood.h"
#include "sampler/variates.h"

namespace gids::sampler {

class Ladies {
 public:
  // How the sources of a layer are drawn: `size` draws, in which a source may come again; `size` different sources, one
  // after the other; or each source independently, `size` of them on average.
  enum class Draws { repeated, distinct, poisson };
  // In proportion to what sources are drawn, over the layer's destinations: to the sum of 1 / degree^2 of those with an
  // edge from the source (Zou et al.), or to the square of the number of these edges (Tripathy et al.).
  enum class Law { degree, count };

  // sizes: numbers of sources, in the form of sample_neighbors' fanouts. Blocks have weights.
  Minibatch sample(HostSampler& host, const Topology& graph, Seeds seeds, std::span<const std::vector<int>> sizes,
                   Law law, Draws draws, const Moment& moment);
  size_t bytes() const {
    return neighborhood_.bytes() + norms_.bytes() + sums_.bytes() + times_.bytes() + counts_.bytes();
  }

 private:
  Block sample_layer(HostSampler& host, const Frontier& frontier, int size, Law law, Draws draws,
                     const Variates& variates);
  double weigh(const Frontier& frontier, Law law);
  void draw(u64 size, double total, const Variates& variates);
  void draw_distinct(u64 size, const Variates& variates);
  void draw_poisson(u64 size, const Variates& variates);

  Neighborhood neighborhood_;
  Scratch<double> norms_;  // of each source: what it is drawn in proportion to
  Scratch<double> sums_;   // running
  Scratch<double> times_;  // waiting times of the sources, twice; the least come first
  Scratch<float> counts_;  // of each source: how much an edge from it counts in a sum; 0: not drawn
};

}  // namespace gids::sampler
