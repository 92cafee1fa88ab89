// Uniform random numbers that change slowly from minibatch to minibatch: the batch dependency of "Cooperative
// Minibatching in Graph Neural Networks" (Balin, LaSalle and Catalyurek, 2023, section 3.2). Called by the samplers.
//
// Minibatches i = 0 ... kappa - 1 of a group lie between two random numbers, those of the group and of the next one.
// With c = i / kappa, normal variates n1, n2 of the two and n = cos(c pi / 2) n1 + sin(c pi / 2) n2, which is normal
// too, the number is Phi(n): uniform at every c, that of the group at c = 0 and that of the next one at c = 1.
// Everything follows from (seed, epoch, step): no state is handed on.
#pragma once

#include "sampler/draws.h"

namespace gids::sampler {

// Where a minibatch lies between two keys of minibatches: c = 0 is at `now`, c = 1 would be at `next`.
struct Moment {
  u64 now, next;
  double c;
};
constexpr u64 endless = 0;  // kappa: every step of an epoch draws alike
Moment moment_of(u64 seed, u64 epoch, u64 step, u64 kappa);

// Phi, and its inverse (Wichura, algorithm AS 241, 1988), p in (0, 1).
double normal_cdf(double x);
double normal_quantile(double p);

// A number in (0, 1) from 64 random bits.
inline double unit(u64 bits) { return (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53; }

// The numbers of one relation, or of one node type, in one layer. 64 random bits stand for each.
class Variates {
 public:
  Variates(const Moment& moment, u32 layer, u32 number);

  bool smooth() const { return smooth_; }
  u64 key() const { return now_; }  // of the numbers where they are not smooth

  // Draw i of a destination.
  u64 draw(u64 node, u32 i) const {
    const u64 bits = random::draw(now_, node, i);
    return smooth_ ? between(bits, random::draw(next_, node, i)) : bits;
  }
  // The numbers of the in-edges of one destination, by their place among these: sources of a kind.
  Variates of_edges(u64 node) const {
    Variates edges = *this;
    edges.now_ = random::draw(now_, node, 0);
    edges.next_ = random::draw(next_, node, 0);
    return edges;
  }
  // The number of a source (random::node_number).
  u64 of_node(u64 node) const {
    const u64 bits = random::node_number(now_, node);
    return smooth_ ? between(bits, random::node_number(next_, node)) : bits;
  }
  // The numbers of sources (random::node_number). What is above `most`, a probability, may come out as all ones.
  void of_nodes(const Lanes& node, u32 count, double most, Lanes& out) const;
  // Which of them are below a limit, a bit each.
  u32 below(const Lanes& node, u32 count, u64 limit) const;

 private:
  u64 between(u64 now, u64 next) const;

  u64 now_, next_;
  bool smooth_;
  double cos_, sin_;
};

}  // namespace gids::sampler
