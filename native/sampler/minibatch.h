// What the samplers on the host make: arrays in buffers that are used again. Knows nothing of how they were drawn.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cache/buffers.h"
#include "sampler/topology.h"

namespace gids::sampler {

// Arrays of one length in a buffer of their own.
using Buffer = std::shared_ptr<cache::BufferPool::Buffer>;

// What one relation contributes to one layer. Edge e leads from source indices[e], a local id, to the destination
// whose range of indptr holds e; it stands at positions[e] of the relation's indices, and counts weights[e] times
// in a sum over all neighbours (null: nothing to correct).
struct Block {
  Buffer memory;
  i64 *indptr = nullptr, *indices = nullptr, *positions = nullptr;
  float* weights = nullptr;
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
  using std::runtime_error::runtime_error;
  BadTopology(const Relation& relation, const std::string& what)
      : std::runtime_error("topology of " + relation.name + ": " + what + "; run `gids verify` for details") {}
};

}  // namespace gids::sampler
