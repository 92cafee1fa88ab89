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

void raise_bad_edge(const Relation& relation, const Frontier& frontier) {
  if (frontier.bad_edge.at() != FirstFault::none)
    throw BadTopology(relation, "indices[" + std::to_string(frontier.bad_edge.at()) + "] is outside 0 to " +
                                    std::to_string(static_cast<i64>(frontier.num_src) - 1));
}

}  // namespace

Minibatch HostSampler::run(const Topology& graph, Seeds seeds, u32 layers, const Expand& expand, const Forest* forest,
                           bool newest) {
  return forest ? run_in(tree_sets_, graph, seeds, layers, expand, forest, newest)
                : run_in(sets_, graph, seeds, layers, expand, nullptr, newest);
}

template <class Set>
Minibatch HostSampler::run_in(std::vector<Set>& sets, const Topology& graph, Seeds seeds, u32 layers,
                              const Expand& expand, const Forest* forest, bool newest) {
  sets.resize(graph.node_types.size());
  for (u32 type = 0; type < sets.size(); ++type) {
    const auto& [count, name] = graph.node_types[type];
    for (const i64 seed : seeds[type])
      if (static_cast<u64>(seed) >= count)
        throw std::out_of_range("seed " + std::to_string(seed) + " is not a " + name + " node: ids run from 0 to " +
                                std::to_string(static_cast<i64>(count) - 1));
    sets[type].start(seeds[type], forest ? forest->of_seeds[type].data() : nullptr);
  }
  Minibatch minibatch;
  std::vector<size_t> begins(sets.size()), ends(sets.size());  // of the nodes that draw
  const u32 first = only_.value_or(0);
  for (u32 layer = first; layer < (only_ ? first + 1 : layers); ++layer) {
    if (newest) begins = ends;
    for (u32 type = 0; type < sets.size(); ++type) ends[type] = sets[type].size();
    auto& blocks = minibatch.layers.emplace_back();
    for (u32 r = 0; r < graph.relations.size(); ++r) {
      const Relation& relation = graph.relations[r];
      FirstFault bad_edge;
      const u32 dst = relation.dst;
      const Frontier frontier = frontier_of(sets, graph, relation, begins[dst], ends[dst], forest, bad_edge);
      blocks.push_back(expand(layer, r, frontier));
      raise_bad_edge(relation, frontier);
      if (only_) continue;
      const Block& block = blocks.back();
      const u32* trees = forest ? trees_of_edges(block, frontier.trees) : nullptr;
      sets[relation.src].relabel(block.indices, block.num_edges, workers_, trees);
    }
    for (u32 r = 0; r < graph.relations.size(); ++r) blocks[r].num_src = sets[graph.relations[r].src].size();
  }
  for (const Set& set : sets) {
    const size_t count = set.size();
    NodeList list{pool_->take((forest ? 2 : 1) * align_up(count * sizeof(i64), 64)), nullptr, nullptr, count};
    std::byte* at = list.memory->memory.data();
    list.ids = carve<i64>(at, count);
    if (count) std::memcpy(list.ids, set.nodes().data(), count * sizeof(i64));
    if (forest) list.trees = carve<i64>(at, count);
    for (size_t i = 0; forest && i < count; ++i) list.trees[i] = set.trees()[i];
    minibatch.nodes.push_back(std::move(list));
  }
  return minibatch;
}

std::vector<Block> HostSampler::induced(const Topology& graph, const Forest* forest, const Restrict& restrict) {
  return forest ? induced_in(tree_sets_, graph, forest, restrict) : induced_in(sets_, graph, nullptr, restrict);
}

template <class Set>
std::vector<Block> HostSampler::induced_in(std::vector<Set>& sets, const Topology& graph, const Forest* forest,
                                           const Restrict& restrict) {
  std::vector<Block> blocks;
  for (u32 r = 0; r < graph.relations.size(); ++r) {
    const Relation& relation = graph.relations[r];
    FirstFault bad_edge;
    const Set& sources = sets[relation.src];
    const Frontier frontier = frontier_of(sets, graph, relation, 0, sets[relation.dst].size(), forest, bad_edge);
    restrict(r, frontier);
    blocks.push_back(collect(
        frontier,
        [&](size_t v, EdgeList& list) {
          const u64 begin = static_cast<u64>(frontier.begins[v]), degree = frontier.degrees[v];
          const u64 tree = frontier.trees ? frontier.trees[v] : 0;
          for (u64 position = begin; position < begin + degree; ++position) {
            const u64 local = sources.find(frontier.source(position), tree);
            if (local == Set::none) continue;
            list.reserve(1);
            list.add(local, position, 1);
          }
        },
        false));
    raise_bad_edge(relation, frontier);
    blocks.back().num_src = sources.size();
  }
  return blocks;
}

template <class Set>
Frontier HostSampler::frontier_of(std::vector<Set>& sets, const Topology& graph, const Relation& relation, size_t begin,
                                  size_t end, const Forest* forest, FirstFault& bad_edge) {
  const Set& set = sets[relation.dst];
  const auto nodes = set.nodes().subspan(begin, end - begin);
  read_ranges(relation, nodes);
  Frontier frontier{relation, graph.node_types[relation.src].count, nodes, begins_.data(), degrees_.data(), bad_edge};
  if (forest) frontier.trees = set.trees() + begin, frontier.tags = forest->tags.data();
  return frontier;
}

// trees: of the block's destinations.
const u32* HostSampler::trees_of_edges(const Block& block, const u32* trees) {
  u32* of_edges = edge_trees_.ensure(block.num_edges);
  workers_.parallel_for(block.num_dst, node_piece, [&](size_t first, size_t last, u32) {
    for (size_t v = first; v < last; ++v)
      std::fill(of_edges + block.indptr[v], of_edges + block.indptr[v + 1], trees[v]);
  });
  return of_edges;
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
  size_t total = begins_.bytes() + degrees_.bytes() + ends_.bytes() + edge_trees_.bytes();
  for (const NodeSet& set : sets_) total += set.bytes();
  for (const TreeSet& set : tree_sets_) total += set.bytes();
  for (const EdgeList& list : lists_) total += list.bytes();
  return total;
}

}  // namespace gids::sampler
