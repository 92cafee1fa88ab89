// Uniform neighbour sampling without replacement on the host: seeds go in, a minibatch comes out. Called by the
// bindings. Knows arrays and threads; nothing of files, features or Python.
#pragma once

#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "cache/buffers.h"
#include "cache/workers.h"
#include "gids/random.h"
#include "sampler/node_set.h"
#include "sampler/scratch.h"
#include "sampler/topology.h"

namespace gids::sampler {

// Arrays of one length in a buffer of their own.
using Buffer = std::shared_ptr<cache::BufferPool::Buffer>;

// What one relation contributes to one layer. Edge e leads from source indices[e], a local id, to the destination
// whose range of indptr holds e; it stands at positions[e] of the relation's indices.
struct Block {
  Buffer memory;
  i64 *indptr = nullptr, *indices = nullptr, *positions = nullptr;
  u64 num_src = 0, num_dst = 0, num_edges = 0;
};

struct NodeList {
  Buffer memory;
  i64* ids = nullptr;
  u64 count = 0;
};

struct Minibatch {
  std::vector<NodeList> nodes;             // by node type
  std::vector<std::vector<Block>> layers;  // the seeds' first; by relation
};

// A topology that contradicts itself.
struct BadTopology : std::runtime_error {
  BadTopology(const Relation& relation, const std::string& what)
      : std::runtime_error("topology of " + relation.name + ": " + what + "; `gids verify` says more") {}
};

class NeighborSampler {
 public:
  NeighborSampler(u32 threads, size_t keep_bytes)
      : workers_(threads), pool_(std::make_shared<cache::BufferPool>(keep_bytes)) {}

  // seeds: by node type; may repeat. fanouts: by layer, the seeds' first, then by relation; 0 or more, or
  // neighbor::all_neighbors. key: of the minibatch. Every relation draws from the nodes that the layers before
  // have found. Throws std::out_of_range for a seed that is no node, BadTopology. One caller at a time.
  Minibatch sample(const Topology& graph, std::span<const std::span<const i64>> seeds,
                   std::span<const std::vector<int>> fanouts, u64 key);

  u32 threads() const { return workers_.threads(); }
  // What is kept between minibatches.
  size_t bytes() const;

 private:
  Block sample_relation(const Topology& graph, u32 relation, std::span<const i64> frontier, int fanout, u64 key);

  cache::Workers workers_;
  std::shared_ptr<cache::BufferPool> pool_;
  std::vector<NodeSet> sets_;  // by node type
  Scratch<i64> begins_;
  Scratch<u64> degrees_;
};

}  // namespace gids::sampler
