// The common part of samplers on the host: threads, the nodes found so far, memory, and the loop over layers. A
// sampler is a function that turns a frontier into a block; see neighbor.h and labor.h. Knows arrays and threads;
// nothing of files, features or Python.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "cache/workers.h"
#include "sampler/frontier.h"
#include "sampler/minibatch.h"
#include "sampler/node_set.h"
#include "sampler/scratch.h"

namespace gids::sampler {

using Seeds = std::span<const std::span<const i64>>;  // by node type; may repeat

// The trees of a minibatch that has a tree for each seed, or for several.
struct Forest {
  std::vector<std::span<const i64>> of_seeds;  // by node type, the tree of each seed, below tags.size()
  std::span<const u32> tags;                   // gids/forest.h
  std::span<const i64> times;                  // of each tree, or empty
};

// Edges that one thread has chosen, destination after destination.
struct EdgeList {
  Scratch<i64> sources, positions;
  Scratch<float> weights;
  size_t count = 0, room = 0;

  // Reserves room for this many more edges, before add.
  void reserve(size_t more) {
    if (count + more <= room) return;
    room = std::max(count + more, 2 * room);
    sources.ensure(room, count);
    positions.ensure(room, count);
    weights.ensure(room, count);
  }
  void add(u64 source, u64 position, float weight) {
    sources.data()[count] = static_cast<i64>(source);
    positions.data()[count] = static_cast<i64>(position);
    weights.data()[count++] = weight;
  }
  size_t bytes() const { return sources.bytes() + positions.bytes() + weights.bytes(); }
};

// Calls f(begin, end) for every piece of [0, n), each of `piece` but for the last, on several threads.
template <class F>
void for_pieces(cache::Workers& workers, size_t n, size_t piece, const F& f) {
  workers.parallel_for(n, piece, [&](size_t first, size_t last, u32) {  // one thread alone gets all of them at once
    for (size_t begin = first; begin < last; begin += piece) f(begin, std::min(last, begin + piece));
  });
}

class HostSampler {
 public:
  // pool: where minibatches get their arrays from; samplers may share one.
  HostSampler(u32 threads, std::shared_ptr<cache::BufferPool> pool) : workers_(threads), pool_(std::move(pool)) {}

  // From now on run() draws only this layer (0: the seeds'), for the seeds as its nodes, and leaves node ids in the
  // blocks; nullopt: all layers. For minibatches whose edges are drawn by several processes.
  void draw_only(std::optional<u32> layer) { only_ = layer; }

  // Makes a block whose indices are node ids; they become local ids afterwards.
  using Expand = std::function<Block(u32 layer, u32 relation, const Frontier&)>;

  // Every relation draws from the nodes that the layers before have found; with `newest` only from those that the last
  // one has. Throws std::out_of_range for a seed that is no node, BadTopology. One caller at a time. forest: the trees
  // of the seeds, or null.
  Minibatch run(const Topology& graph, Seeds seeds, u32 layers, const Expand& expand, const Forest* forest = nullptr,
                bool newest = false);

  // Instead of a layer's blocks: all edges among the nodes of the minibatch that run() has made. With trees, those
  // within a tree. restrict(relation, frontier) leaves in-edges out, with bound().
  using Restrict = std::function<void(u32 relation, const Frontier&)>;
  std::vector<Block> induced(const Topology& graph, const Forest* forest, const Restrict& restrict);

  // For `expand` and `restrict`: node v of the frontier keeps the in-edges [begin, begin + degree).
  void bound(size_t v, i64 begin, u64 degree) {
    begins_.data()[v] = begin;
    degrees_.data()[v] = degree;
  }

  // For `expand`: a block with room for this many edges; indptr[0] is 0.
  Block make_block(u64 num_dst, u64 num_edges, bool weighted);
  // A block of the edges that choose(v, list) adds for each destination v, on several threads.
  Block collect(const Frontier& frontier, const std::function<void(size_t v, EdgeList&)>& choose, bool weighted = true);

  cache::Workers& workers() { return workers_; }
  // Memory kept between minibatches, without the pool.
  size_t bytes() const;

 private:
  template <class Set>
  Minibatch run_in(std::vector<Set>& sets, const Topology& graph, Seeds seeds, u32 layers, const Expand& expand,
                   const Forest* forest, bool newest);
  template <class Set>
  std::vector<Block> induced_in(std::vector<Set>& sets, const Topology& graph, const Forest* forest,
                                const Restrict& restrict);
  template <class Set>
  Frontier frontier_of(std::vector<Set>& sets, const Topology& graph, const Relation& relation, size_t begin,
                       size_t end, const Forest* forest, FirstFault& bad_edge);
  const u32* trees_of_edges(const Block& block, const u32* trees);
  void read_ranges(const Relation& relation, std::span<const i64> nodes);

  cache::Workers workers_;
  std::shared_ptr<cache::BufferPool> pool_;
  std::optional<u32> only_;
  std::vector<NodeSet> sets_;  // by node type
  std::vector<TreeSet> tree_sets_;
  Scratch<u32> edge_trees_;  // of the edges that are relabeled
  Scratch<i64> begins_;
  Scratch<u64> degrees_;
  std::vector<EdgeList> lists_;  // by piece of the frontier
  Scratch<i64> ends_;            // of each destination's edges in its list
};

}  // namespace gids::sampler
