// The random numbers of gids/variates.h, and many of them at once. Called by the samplers.
#pragma once

#include "gids/variates.h"
#include "sampler/draws.h"

namespace gids::sampler {

using variates::unit;

// How the minibatches of successive steps depend on each other.
struct Dependency {
  static constexpr u64 endless = 0;  // kappa: all steps of an epoch number draw alike
  Dependency(u64 kappa, bool nested = false) : kappa(kappa), nested(nested) {}
  u64 kappa;    // steps in a group
  bool nested;  // they are cut from one large minibatch, and all draw alike; otherwise numbers change gradually
  bool gradual() const { return !nested && kappa != 1; }
};

// Where a minibatch lies between two keys of minibatches: c = 0 is at `now`, c = 1 would be at `next`.
struct Moment {
  u64 now, next;
  double c;
};
Moment moment_of(u64 seed, u64 epoch, u64 step, Dependency dependency);

// The numbers of one relation, or of one node type, in one layer.
class Variates : public variates::Variates {
 public:
  Variates(const Moment& moment, u32 layer, u32 number);

  // The numbers of sources (random::node_number). What is above `most`, a probability, may come out as all ones.
  void of_nodes(const Lanes& node, u32 count, double most, Lanes& out) const;
  // Which of them are below a limit, a bit each.
  u32 below(const Lanes& node, u32 count, u64 limit) const;

  Variates of_edges(u64 node) const { return Variates(variates::Variates::of_edges(node)); }

 private:
  explicit Variates(const variates::Variates& numbers) : variates::Variates(numbers) {}
};

}  // namespace gids::sampler
