#include "sampler/neighbor.h"

#include <atomic>
#include <cstring>

#include "gids/neighbor.h"
#include "sampler/pick.h"

namespace gids::sampler {

namespace {

constexpr size_t nodes_ahead = 16;  // entries of indptr fetched while another is read
constexpr size_t node_piece = 512;  // nodes that one thread takes at a time
constexpr u64 none = ~u64{0};

// The least position where something is wrong.
class FirstFault {
 public:
  void note(u64 at) {
    u64 held = at_.load(std::memory_order_relaxed);
    while (at < held && !at_.compare_exchange_weak(held, at, std::memory_order_relaxed)) {
    }
  }
  u64 at() const { return at_.load(std::memory_order_relaxed); }

 private:
  std::atomic<u64> at_{none};
};

i64* place(std::byte*& at, size_t count) {
  i64* here = reinterpret_cast<i64*>(at);
  at += align_up(count * sizeof(i64), 64);
  return here;
}

// Positions of the sampled edges of frontier[first .. last) go to positions[indptr[first] ...).
void choose(std::span<const i64> frontier, size_t first, size_t last, const i64* begins, const u64* degrees,
            int fanout, u64 key, const i64* indptr, i64* positions) {
  Picks picks;
  for (size_t v = first; v < last; ++v) {
    i64* to = positions + indptr[v];
    if (neighbor::sampled_count(degrees[v], fanout) == degrees[v]) {
      for (u64 e = 0; e < degrees[v]; ++e) to[e] = begins[v] + static_cast<i64>(e);
      continue;
    }
    if (fanout == 0) continue;
    const u32 lane = picks.count++;
    picks.node[lane] = static_cast<u64>(frontier[v]);
    picks.degree[lane] = degrees[v];
    picks.begin[lane] = begins[v];
    picks.to[lane] = to;
    if (picks.count == pick_lanes) {
      pick(picks, key, static_cast<u32>(fanout));
      picks.count = 0;
    }
  }
  for (u32 lane = picks.count; lane < pick_lanes; ++lane) picks.node[lane] = 0;  // drawn for, and not used
  if (picks.count) pick(picks, key, static_cast<u32>(fanout));
}

template <class Index>
void read_sources(const Index* indices, const i64* positions, size_t n, u64 num_src, i64* sources,
                  FirstFault& fault) {
  for (size_t e = 0; e < n; ++e) __builtin_prefetch(&indices[positions[e]], 0, 3);
  for (size_t e = 0; e < n; ++e) {
    const i64 source = indices[positions[e]];
    if (static_cast<u64>(source) >= num_src) {
      fault.note(static_cast<u64>(positions[e]));
      sources[e] = 0;
      continue;
    }
    sources[e] = source;
  }
}

}  // namespace

Minibatch NeighborSampler::sample(const Topology& graph, std::span<const std::span<const i64>> seeds,
                                  std::span<const std::vector<int>> fanouts, u64 key) {
  sets_.resize(graph.node_types.size());
  for (u32 type = 0; type < sets_.size(); ++type) {
    const auto& [count, name] = graph.node_types[type];
    for (const i64 seed : seeds[type])
      if (static_cast<u64>(seed) >= count)
        throw std::out_of_range("seed " + std::to_string(seed) + " is no " + name + " node: ids run from 0 to " +
                                std::to_string(static_cast<i64>(count) - 1));
    sets_[type].start(seeds[type]);
  }
  Minibatch minibatch;
  std::vector<size_t> frontier(sets_.size());
  for (u32 layer = 0; layer < fanouts.size(); ++layer) {
    for (u32 type = 0; type < sets_.size(); ++type) frontier[type] = sets_[type].size();
    auto& blocks = minibatch.layers.emplace_back();
    for (u32 r = 0; r < graph.relations.size(); ++r) {
      const Relation& relation = graph.relations[r];
      const auto nodes = sets_[relation.dst].nodes().first(frontier[relation.dst]);
      blocks.push_back(sample_relation(graph, r, nodes, fanouts[layer][r], random::layer_key(key, layer, r)));
      sets_[relation.src].relabel(blocks.back().indices, blocks.back().num_edges, workers_);
    }
    for (u32 r = 0; r < graph.relations.size(); ++r) blocks[r].num_src = sets_[graph.relations[r].src].size();
  }
  for (const NodeSet& set : sets_) {
    NodeList list{pool_->take(set.size() * sizeof(i64)), nullptr, set.size()};
    list.ids = reinterpret_cast<i64*>(list.memory->memory.data());
    if (set.size()) std::memcpy(list.ids, set.nodes().data(), set.size() * sizeof(i64));
    minibatch.nodes.push_back(std::move(list));
  }
  return minibatch;
}

Block NeighborSampler::sample_relation(const Topology& graph, u32 r, std::span<const i64> frontier, int fanout,
                                       u64 key) {
  const Relation& relation = graph.relations[r];
  const size_t n = frontier.size();
  i64* begins = begins_.ensure(n);
  u64* degrees = degrees_.ensure(n);
  FirstFault bad_node, bad_edge;
  workers_.parallel_for(n, node_piece, [&](size_t first, size_t last, u32) {
    for (size_t v = first; v < last; ++v) {
      if (v + nodes_ahead < last) __builtin_prefetch(&relation.indptr[frontier[v + nodes_ahead]], 0, 3);
      const i64 begin = relation.indptr[frontier[v]], end = relation.indptr[frontier[v] + 1];
      const bool bad = begin < 0 || end < begin || static_cast<u64>(end) > relation.num_edges;
      if (bad) bad_node.note(static_cast<u64>(frontier[v]));
      begins[v] = begin;
      degrees[v] = bad ? 0 : static_cast<u64>(end - begin);
    }
  });
  if (bad_node.at() != none)
    throw BadTopology(relation, "indptr falls, or leaves the indices, at node " + std::to_string(bad_node.at()));
  u64 edges = 0;
  for (size_t v = 0; v < n; ++v) edges += neighbor::sampled_count(degrees[v], fanout);

  Block block;
  block.num_dst = n;
  block.num_edges = edges;
  const size_t bytes = align_up((n + 1) * sizeof(i64), 64) + 2 * align_up(edges * sizeof(i64), 64);
  block.memory = pool_->take(bytes);
  std::byte* at = block.memory->memory.data();
  block.indptr = place(at, n + 1);
  block.indices = place(at, edges);
  block.positions = place(at, edges);
  block.indptr[0] = 0;
  for (size_t v = 0; v < n; ++v)
    block.indptr[v + 1] = block.indptr[v] + static_cast<i64>(neighbor::sampled_count(degrees[v], fanout));

  const u64 num_src = graph.node_types[relation.src].count;
  workers_.parallel_for(n, node_piece, [&](size_t first, size_t last, u32) {
    for (size_t v = first; v < last; v += pick_lanes) {
      const size_t end = std::min(last, v + pick_lanes);
      choose(frontier, v, end, begins, degrees, fanout, key, block.indptr, block.positions);
      const i64 from = block.indptr[v];
      const size_t count = static_cast<size_t>(block.indptr[end] - from);
      if (relation.wide)
        read_sources(static_cast<const i64*>(relation.indices), block.positions + from, count, num_src,
                     block.indices + from, bad_edge);
      else
        read_sources(static_cast<const int*>(relation.indices), block.positions + from, count, num_src,
                     block.indices + from, bad_edge);
    }
  });
  if (bad_edge.at() != none)
    throw BadTopology(relation, "indices[" + std::to_string(bad_edge.at()) + "] is outside 0 to " +
                                    std::to_string(static_cast<i64>(num_src) - 1));
  return block;
}

size_t NeighborSampler::bytes() const {
  size_t total = begins_.bytes() + degrees_.bytes() + pool_->idle_bytes();
  for (const NodeSet& set : sets_) total += set.bytes();
  return total;
}

}  // namespace gids::sampler
