#include "sampler/neighbor.h"

#include <algorithm>

#include "gids/neighbor.h"
#include "gids/weighted.h"
#include "sampler/least.h"
#include "sampler/pick.h"

namespace gids::sampler {

namespace {

constexpr size_t node_piece = 512;  // nodes that one thread takes at a time

// Positions of the sampled edges of frontier[first .. last) go to positions[indptr[first] ...).
void choose(const Frontier& frontier, size_t first, size_t last, int fanout, u64 key, const i64* indptr,
            i64* positions) {
  Picks picks;
  for (size_t v = first; v < last; ++v) {
    i64* to = positions + indptr[v];
    const u64 degree = frontier.degrees[v];
    if (neighbor::sampled_count(degree, fanout) == degree) {
      for (u64 e = 0; e < degree; ++e) to[e] = frontier.begins[v] + static_cast<i64>(e);
      continue;
    }
    if (fanout == 0) continue;
    const u32 lane = picks.count++;
    picks.node[lane] = frontier.drawn_as(v);
    picks.degree[lane] = degree;
    picks.begin[lane] = frontier.begins[v];
    picks.to[lane] = to;
    if (picks.count == pick_lanes) {
      pick(picks, key, static_cast<u32>(fanout));
      picks.count = 0;
    }
  }
  for (u32 lane = picks.count; lane < pick_lanes; ++lane) picks.node[lane] = 0;  // drawn for, and not used
  if (picks.count) pick(picks, key, static_cast<u32>(fanout));
}

void read_sources(const Frontier& frontier, const i64* positions, size_t n, i64* sources) {
  for (size_t e = 0; e < n; ++e) frontier.prefetch(static_cast<u64>(positions[e]));
  for (size_t e = 0; e < n; ++e) sources[e] = static_cast<i64>(frontier.source(static_cast<u64>(positions[e])));
}

Block sample_uniform(HostSampler& host, const Frontier& frontier, int fanout, u64 key) {
  const size_t n = frontier.size();
  u64 edges = 0;
  for (size_t v = 0; v < n; ++v) edges += neighbor::sampled_count(frontier.degrees[v], fanout);
  Block block = host.make_block(n, edges, false);
  for (size_t v = 0; v < n; ++v)
    block.indptr[v + 1] = block.indptr[v] + static_cast<i64>(neighbor::sampled_count(frontier.degrees[v], fanout));
  host.workers().parallel_for(n, node_piece, [&](size_t first, size_t last, u32) {
    for (size_t v = first; v < last; v += pick_lanes) {
      const size_t end = std::min(last, v + pick_lanes);
      choose(frontier, v, end, fanout, key, block.indptr, block.positions);
      const i64 from = block.indptr[v];
      read_sources(frontier, block.positions + from, static_cast<size_t>(block.indptr[end] - from),
                   block.indices + from);
    }
  });
  return block;
}

std::vector<double>& no_sums() {
  static thread_local std::vector<double> sums;
  sums.clear();
  return sums;
}

// The weights of destination v's in-edges, those from near sources taken `factor` times; in memory of the thread.
const float* favour(const Frontier& frontier, size_t v, const float* weights, const u8* near, float factor) {
  static thread_local std::vector<float> favoured;
  const u64 degree = frontier.degrees[v], begin = static_cast<u64>(frontier.begins[v]);
  favoured.resize(degree);
  Lanes source;
  for (u64 first = 0; first < degree; first += draw_lanes) {
    const u32 count = static_cast<u32>(std::min<u64>(draw_lanes, degree - first));
    frontier.sources(begin + first, count, source);
    for (u32 lane = 0; lane < count; ++lane)
      favoured[first + lane] =
          weighted::favoured(weights ? weights[first + lane] : 1.0f, weighted::is_near(near, source[lane]), factor);
  }
  return favoured.data();
}

// Destination v, of any kind but uniform without replacement and independent. weights: of its in-edges, or null.
void take_any(const Frontier& frontier, size_t v, int fanout, bool replace, const float* weights,
              const Variates& variates, EdgeList& list) {
  const u64 degree = frontier.degrees[v], begin = static_cast<u64>(frontier.begins[v]);
  const u64 node = frontier.drawn_as(v);
  u64 possible = degree;
  if (weights) possible = static_cast<u64>(std::count_if(weights, weights + degree, [](float w) { return w > 0; }));
  if (fanout == 0 || possible == 0) return;
  const u64 k = static_cast<u64>(fanout);
  if (fanout == neighbor::all_neighbors || (!replace && possible <= k)) {
    list.reserve(possible);
    for (u64 e = 0; e < degree; ++e)
      if (!weights || weights[e] > 0) list.add(frontier.source(begin + e), begin + e, 1);
    return;
  }
  const auto add = [&](u64 e, float weight) { list.add(frontier.source(begin + e), begin + e, weight); };
  if (!weights && !replace) return take_least(frontier, v, k, variates.of_edges(node), Numbered::edges, 1, list);
  list.reserve(k);
  if (!weights) {
    for (u32 i = 0; i < k; ++i) add(random::below(variates.draw(node, i), degree), 1);
    return;
  }
  if (replace) {  // by the inverse of the running sum
    auto& sums = no_sums();
    double sum = 0;
    u64 last = 0;  // the last edge that can be drawn
    for (u64 e = 0; e < degree; ++e) {
      sums.push_back(sum += weights[e]);
      if (weights[e] > 0) last = e;
    }
    for (u32 i = 0; i < k; ++i) {
      const auto found = std::upper_bound(sums.begin(), sums.end(), unit(variates.draw(node, i)) * sum);
      const u64 e = std::min(last, static_cast<u64>(found - sums.begin()));
      add(e, weighted::replaced_estimate(weights[e], sum, k));
    }
    return;
  }
  // Exponential waiting times with the weights as rates: the first k to come.
  auto& candidates = no_candidates();
  const Variates edges = variates.of_edges(node);
  Lanes edge = {}, bits;
  for (u64 first = 0; first < degree; first += draw_lanes) {
    const u32 count = static_cast<u32>(std::min<u64>(draw_lanes, degree - first));
    for (u32 lane = 0; lane < count; ++lane) edge[lane] = first + lane;
    edges.of_nodes(edge, count, 1, bits);
    for (u32 lane = 0; lane < count; ++lane)
      if (const float weight = weights[first + lane]; weight > 0)
        candidates.push_back({weighted::waiting_time(bits[lane], weight), first + lane, 0});
  }
  settle(candidates, k);
  for (u64 i = 0; i < k; ++i)
    add(candidates[i].edge, weighted::estimate(weights[candidates[i].edge], candidates[k].rank));
}

// The edges that the frontier draws by relation r.
Block draw(HostSampler& host, const Frontier& frontier, u32 r, int fanout, const NeighborOptions& options,
           const Variates& variates) {
  const float* weights = r < options.weights.size() ? options.weights[r] : nullptr;
  const u8* near = r < options.near.size() ? options.near[r] : nullptr;
  if (!options.replace && !options.dependent && !weights && !near)
    return sample_uniform(host, frontier, fanout, variates.now);
  return host.collect(
      frontier,
      [&](size_t v, EdgeList& list) {
        const float* of_edges = weights ? weights + frontier.begins[v] : nullptr;
        const bool chooses = fanout > 0 && (options.replace || frontier.degrees[v] > static_cast<u64>(fanout));
        if (near && chooses) of_edges = favour(frontier, v, of_edges, near, options.factor);
        take_any(frontier, v, fanout, options.replace, of_edges, variates, list);
      },
      near ? options.weigh_near : weights != nullptr);
}

}  // namespace

Minibatch sample_neighbors(HostSampler& host, const Topology& graph, Seeds seeds, Fanouts fanouts,
                           const NeighborOptions& options, const Moment& moment, const Forest* forest) {
  const auto times_of = [&](u32 r) { return r < options.times.size() ? options.times[r] : Times{}; };
  const auto expand = [&](u32 layer, u32 r, const Frontier& frontier) {
    const int fanout = fanouts[layer][r];
    const Times times = times_of(r);
    if (times.values) {
      const bool all = fanout == neighbor::all_neighbors || !options.last;
      leave_out_later(host, frontier, times, forest->times, all ? no_limit : static_cast<u64>(fanout));
    }
    return draw(host, frontier, r, fanout, options, Variates(moment, options.newest ? 0 : layer, r));
  };
  Minibatch minibatch = host.run(graph, seeds, static_cast<u32>(fanouts.size()), expand, forest, options.newest);
  if (options.induced) {
    minibatch.layers.clear();
    minibatch.layers.push_back(host.induced(graph, forest, [&](u32 r, const Frontier& frontier) {
      if (const Times times = times_of(r); times.values)
        leave_out_later(host, frontier, times, forest->times, no_limit);
    }));
  }
  return minibatch;
}

}  // namespace gids::sampler
