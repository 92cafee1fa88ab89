#include "sampler/neighbor.h"

#include "gids/neighbor.h"
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
    picks.node[lane] = static_cast<u64>(frontier.nodes[v]);
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
    block.indptr[v + 1] =
        block.indptr[v] + static_cast<i64>(neighbor::sampled_count(frontier.degrees[v], fanout));
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

}  // namespace

Minibatch sample_neighbors(HostSampler& host, const Topology& graph, Seeds seeds, Fanouts fanouts, u64 key) {
  return host.run(graph, seeds, static_cast<u32>(fanouts.size()),
                  [&](u32 layer, u32 r, const Frontier& frontier) {
                    return sample_uniform(host, frontier, fanouts[layer][r], random::layer_key(key, layer, r));
                  });
}

}  // namespace gids::sampler
