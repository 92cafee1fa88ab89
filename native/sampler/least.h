// The k in-edges of a destination with the least numbers. Called by labor.cpp and neighbor.cpp.
#pragma once

#include <vector>

#include "sampler/host_sampler.h"
#include "sampler/variates.h"

namespace gids::sampler {

struct Candidate {
  double rank;
  u64 edge, source;
  // Of those with the same number, as parallel edges of LABOR, the first goes first.
  bool operator<(const Candidate& other) const {
    return rank < other.rank || (rank == other.rank && edge < other.edge);
  }
};

// Memory of the calling thread, empty.
std::vector<Candidate>& no_candidates();

// Of more than k candidates the least k come to the front, in the order of the edges; the next one is behind them.
void settle(std::vector<Candidate>& candidates, u64 k);

// Whether an in-edge has its source's number or its own.
enum class Numbered { sources, edges };

// Adds the k in-edges of destination v with the least numbers. 0 < k < degree.
void take_least(const Frontier& frontier, size_t v, u64 k, const Variates& variates, Numbered numbered, float weight,
                EdgeList& list);

}  // namespace gids::sampler
