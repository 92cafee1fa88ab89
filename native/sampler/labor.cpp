#include "sampler/labor.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <limits>

#include "gids/labor.h"
#include "gids/neighbor.h"
#include "sampler/least.h"

namespace gids::sampler {

namespace {

constexpr size_t node_piece = 64;  // destinations that one thread takes at a time: degrees differ much
constexpr size_t source_piece = 1024;
constexpr int most_improvements = 100;
constexpr double least_gain = 1e-4;  // of the expected number of nodes: less is convergence

void take_all(const Frontier& frontier, size_t v, EdgeList& list) {
  const u64 begin = static_cast<u64>(frontier.begins[v]);
  list.reserve(frontier.degrees[v]);
  for (u64 e = 0; e < frontier.degrees[v]; ++e) list.add(frontier.source(begin + e), begin + e, 1.0f);
}

void take_below(const Frontier& frontier, size_t v, u64 k, const Variates& variates, EdgeList& list) {
  const u64 begin = static_cast<u64>(frontier.begins[v]), degree = frontier.degrees[v];
  const u64 limit = labor::limit(degree, k);
  const float weight = labor::weight(degree, k);
  Lanes node = {};
  for (u64 first = 0; first < degree; first += draw_lanes) {
    const u32 count = static_cast<u32>(std::min<u64>(draw_lanes, degree - first));
    frontier.sources(begin + first, count, node);
    list.reserve(count);
    for (u32 taken = variates.below(node, count, limit); taken; taken &= taken - 1) {
      const u32 lane = static_cast<u32>(std::countr_zero(taken));
      list.add(node[lane], begin + first + lane, weight);
    }
  }
}

// c with sum over t of 1 / min(1, c pi_t) = d^2 / k, for k < d. Starting below, each round solves for c with those
// taken for certain that the last c makes certain, which stays below: at most d rounds, mostly two or three.
double solve_one(const i64* sources, u64 degree, const double* pi, u64 k) {
  const double target = static_cast<double>(degree) * static_cast<double>(degree) / static_cast<double>(k);
  double c = 0;
  u64 certain = 0;
  for (u64 round = 0; round <= degree; ++round) {
    double rest = 0;
    u64 now_certain = 0;
    for (u64 e = 0; e < degree; ++e) {
      const double p = pi[sources[e]];
      if (c * p >= 1) ++now_certain;
      else rest += 1 / p;
    }
    if (round && now_certain == certain) break;
    certain = now_certain;
    c = rest / (target - static_cast<double>(certain));
  }
  return c;
}

}  // namespace

Minibatch Labor::sample(HostSampler& host, const Topology& graph, Seeds seeds,
                        std::span<const std::vector<int>> fanouts, const LaborOptions& options, const Moment& moment) {
  return host.run(graph, seeds, static_cast<u32>(fanouts.size()), [&](u32 layer, u32 r, const Frontier& frontier) {
    const u32 shared = options.layer_dependency ? 0 : layer;
    const Variates variates(moment, shared, frontier.relation.src);
    const int fanout = fanouts[layer][r];
    return options.importance_sampling == 0 || fanout <= 0
               ? sample_alone(host, frontier, fanout, options.fixed_count, variates)
               : sample_together(host, frontier, fanout, options, variates);
  });
}

Block Labor::sample_alone(HostSampler& host, const Frontier& frontier, int fanout, bool fixed_count,
                          const Variates& variates) {
  return host.collect(frontier, [&](size_t v, EdgeList& list) {
    const u64 degree = frontier.degrees[v];
    if (neighbor::sampled_count(degree, fanout) == degree) return take_all(frontier, v, list);
    if (fanout == 0) return;
    const u64 k = static_cast<u64>(fanout);
    if (fixed_count) take_least(frontier, v, k, variates, Numbered::sources, labor::weight(degree, k), list);
    else take_below(frontier, v, k, variates, list);
  });
}

Block Labor::sample_together(HostSampler& host, const Frontier& frontier, int fanout, const LaborOptions& options,
                             const Variates& variates) {
  neighborhood_.read(host.workers(), frontier);
  const u64 k = static_cast<u64>(fanout);
  improve(host, frontier, k, options.importance_sampling);
  const std::span<const i64> sources = neighborhood_.sources();
  u64* bits = bits_.ensure(sources.size());
  host.workers().parallel_for(sources.size(), source_piece, [&](size_t first, size_t last, u32) {
    Lanes node = {}, drawn;
    for (size_t at = first; at < last; at += draw_lanes) {
      const size_t count = std::min<size_t>(draw_lanes, last - at);
      for (size_t lane = 0; lane < count; ++lane) node[lane] = static_cast<u64>(sources[at + lane]);
      variates.of_nodes(node, static_cast<u32>(count), 1, drawn);
      std::copy(drawn, drawn + count, bits + at);
    }
  });
  const double *pi = pi_.data(), *factor = factor_.data();
  return host.collect(frontier, [&](size_t v, EdgeList& list) {
    const u64 degree = frontier.degrees[v], begin = static_cast<u64>(frontier.begins[v]);
    if (degree <= k) return take_all(frontier, v, list);
    const i64* local = neighborhood_.local(v);
    list.reserve(degree);
    if (!options.fixed_count) {
      for (u64 e = 0; e < degree; ++e) {
        const double p = std::min(1.0, factor[v] * pi[local[e]]);
        if (unit(bits[local[e]]) <= p)
          list.add(static_cast<u64>(sources[static_cast<size_t>(local[e])]), begin + e, static_cast<float>(1 / p));
      }
      return;
    }
    // Priority sampling: given the (k + 1)-th least of r / pi, each of the k before it was below with probability
    // min(1, pi * that), so that these weights are unbiased as well.
    auto& candidates = no_candidates();
    for (u64 e = 0; e < degree; ++e)
      candidates.push_back({unit(bits[local[e]]) / pi[local[e]], e, static_cast<u64>(local[e])});
    settle(candidates, k);
    for (u64 i = 0; i < k; ++i) {
      const double p = std::min(1.0, pi[candidates[i].source] * candidates[k].rank);
      list.add(static_cast<u64>(sources[candidates[i].source]), begin + candidates[i].edge, static_cast<float>(1 / p));
    }
  });
}

// pi_t <- pi_t max over s of c_s, so often; then the factors c_s that go with the last pi.
void Labor::improve(HostSampler& host, const Frontier& frontier, u64 fanout, int times) {
  const size_t count = neighborhood_.sources().size();
  double* pi = pi_.ensure(count);
  std::fill(pi, pi + count, 1.0);
  double before = std::numeric_limits<double>::infinity();
  const bool to_the_end = times == LaborOptions::to_convergence;
  for (int i = 0; i < (to_the_end ? most_improvements : times); ++i) {
    solve(host, frontier, fanout);
    const double* most = most_.data();
    double expected = 0;  // nodes that the layer finds
    for (size_t t = 0; t < count; ++t) {
      pi[t] *= most[t];
      expected += std::min(1.0, pi[t]);
    }
    if (to_the_end && expected >= before * (1 - least_gain)) break;
    before = expected;
  }
  solve(host, frontier, fanout);
}

// The greatest factor is the same whoever comes first: positive numbers are ordered as their bits are.
void Labor::solve(HostSampler& host, const Frontier& frontier, u64 fanout) {
  const size_t count = neighborhood_.sources().size();
  double* factor = factor_.ensure(frontier.size());
  double* most = most_.ensure(count);
  const double* pi = pi_.data();
  std::fill(most, most + count, 0.0);
  host.workers().parallel_for(frontier.size(), node_piece, [&](size_t first, size_t last, u32) {
    for (size_t v = first; v < last; ++v) {
      const u64 degree = frontier.degrees[v];
      const i64* local = neighborhood_.local(v);
      double c = 0;
      if (degree <= fanout)
        for (u64 e = 0; e < degree; ++e) c = std::max(c, 1 / pi[local[e]]);  // takes all of them
      else c = solve_one(local, degree, pi, fanout);
      factor[v] = c;
      for (u64 e = 0; e < degree; ++e) {
        std::atomic_ref<double> greatest(most[local[e]]);
        double held = greatest.load(std::memory_order_relaxed);
        while (held < c && !greatest.compare_exchange_weak(held, c, std::memory_order_relaxed)) {
        }
      }
    }
  });
}

size_t Labor::bytes() const {
  return neighborhood_.bytes() + pi_.bytes() + factor_.bytes() + most_.bytes() + bits_.bytes();
}

}  // namespace gids::sampler
