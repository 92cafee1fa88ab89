#include "sampler/host_sampler.h"

#include <cstring>

namespace gids::sampler {

namespace {

constexpr size_t nodes_ahead = 16;  // entries of indptr fetched while another is read
constexpr size_t node_piece = 512;  // nodes that one thread takes at a time
constexpr size_t lists_ahead = 4;   // destinations whose first in-edges are fetched while another's are read

template <class T>
T* carve(std::byte*& at, size_t count) {
  T* here = reinterpret_cast<T*>(at);
  at += align_up(count * sizeof(T), 64);
  return here;
}

}  // namespace

Minibatch HostSampler::run(const Topology& graph, Seeds seeds, u32 layers, const Expand& expand) {
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
  std::vector<size_t> known(sets_.size());
  for (u32 layer = 0; layer < layers; ++layer) {
    for (u32 type = 0; type < sets_.size(); ++type) known[type] = sets_[type].size();
    auto& blocks = minibatch.layers.emplace_back();
    for (u32 r = 0; r < graph.relations.size(); ++r) {
      const Relation& relation = graph.relations[r];
      const auto nodes = sets_[relation.dst].nodes().first(known[relation.dst]);
      read_ranges(relation, nodes);
      FirstFault bad_edge;
      const u64 num_src = graph.node_types[relation.src].count;
      blocks.push_back(expand(layer, r, {relation, num_src, nodes, begins_.data(), degrees_.data(), bad_edge}));
      if (bad_edge.at() != FirstFault::none)
        throw BadTopology(relation, "indices[" + std::to_string(bad_edge.at()) + "] is outside 0 to " +
                                        std::to_string(static_cast<i64>(num_src) - 1));
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

void HostSampler::read_ranges(const Relation& relation, std::span<const i64> nodes) {
  i64* begins = begins_.ensure(nodes.size());
  u64* degrees = degrees_.ensure(nodes.size());
  FirstFault bad_node;
  workers_.parallel_for(nodes.size(), node_piece, [&](size_t first, size_t last, u32) {
    for (size_t v = first; v < last; ++v) {
      if (v + nodes_ahead < last) __builtin_prefetch(&relation.indptr[nodes[v + nodes_ahead]], 0, 3);
      const i64 begin = relation.indptr[nodes[v]], end = relation.indptr[nodes[v] + 1];
      const bool bad = begin < 0 || end < begin || static_cast<u64>(end) > relation.num_edges;
      if (bad) bad_node.note(static_cast<u64>(nodes[v]));
      begins[v] = begin;
      degrees[v] = bad ? 0 : static_cast<u64>(end - begin);
    }
  });
  if (bad_node.at() != FirstFault::none)
    throw BadTopology(relation, "indptr decreases or exceeds the indices at node " + std::to_string(bad_node.at()));
}

Block HostSampler::make_block(u64 num_dst, u64 num_edges, bool weighted) {
  Block block;
  block.num_dst = num_dst;
  block.num_edges = num_edges;
  const size_t bytes = align_up((num_dst + 1) * sizeof(i64), 64) + 2 * align_up(num_edges * sizeof(i64), 64) +
                       (weighted ? align_up(num_edges * sizeof(float), 64) : 0);
  block.memory = pool_->take(bytes);
  std::byte* at = block.memory->memory.data();
  block.indptr = carve<i64>(at, num_dst + 1);
  block.indices = carve<i64>(at, num_edges);
  block.positions = carve<i64>(at, num_edges);
  if (weighted) block.weights = carve<float>(at, num_edges);
  block.indptr[0] = 0;
  return block;
}

Block HostSampler::collect(const Frontier& frontier, const std::function<void(size_t v, EdgeList&)>& choose,
                           bool weighted) {
  const size_t n = frontier.size(), pieces = div_ceil(n, node_piece);
  if (lists_.size() < pieces) lists_.resize(pieces);
  i64* ends = ends_.ensure(n);
  for_pieces(workers_, n, node_piece, [&](size_t first, size_t last) {
    EdgeList& list = lists_[first / node_piece];
    list.count = 0;
    for (size_t v = first; v < last; ++v) {
      if (v + lists_ahead < last) frontier.prefetch(static_cast<u64>(frontier.begins[v + lists_ahead]));
      choose(v, list);
      ends[v] = static_cast<i64>(list.count);
    }
  });
  u64 edges = 0;
  for (size_t p = 0; p < pieces; ++p) edges += lists_[p].count;
  Block block = make_block(n, edges, weighted);
  i64 base = 0;
  for (size_t p = 0; p < pieces; ++p) {
    const size_t last = std::min(n, (p + 1) * node_piece);
    for (size_t v = p * node_piece; v < last; ++v) block.indptr[v + 1] = base + ends[v];
    base += static_cast<i64>(lists_[p].count);
  }
  for_pieces(workers_, n, node_piece, [&](size_t first, size_t) {
    const EdgeList& list = lists_[first / node_piece];
    const size_t count = list.count;
    if (count == 0) return;
    const i64 at = block.indptr[first];
    std::memcpy(block.indices + at, list.sources.data(), count * sizeof(i64));
    std::memcpy(block.positions + at, list.positions.data(), count * sizeof(i64));
    if (weighted) std::memcpy(block.weights + at, list.weights.data(), count * sizeof(float));
  });
  return block;
}

size_t HostSampler::bytes() const {
  size_t total = begins_.bytes() + degrees_.bytes() + ends_.bytes();
  for (const NodeSet& set : sets_) total += set.bytes();
  for (const EdgeList& list : lists_) total += list.bytes();
  return total;
}

}  // namespace gids::sampler
