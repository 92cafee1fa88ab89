// The result of samplers on the host: arrays in recycled buffers.
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

// The edges of one relation in one layer. Edge e leads from source indices[e], a local id, to the destination whose
// range of indptr holds e. It is at positions[e] of the relation's indices, and has weights[e] in a sum over all
// neighbors (null: all are 1).
struct Block {
  Buffer memory;
  i64 *indptr = nullptr, *indices = nullptr, *positions = nullptr;
  float* weights = nullptr;
  u64 num_src = 0, num_dst = 0, num_edges = 0;
};

struct NodeList {
  Buffer memory;
  i64* ids = nullptr;
  i64* trees = nullptr;  // null if the minibatch has no trees
  u64 count = 0;
};

struct Minibatch {
  std::vector<NodeList> nodes;             // by node type
  std::vector<std::vector<Block>> layers;  // the seeds' first; by relation
};

// The error of an inconsistent topology.
struct BadTopology : std::runtime_error {
  using std::runtime_error::runtime_error;
  BadTopology(const Relation& relation, const std::string& what)
      : std::runtime_error("topology of " + relation.name + ": " + what + "; run `gids verify` for details") {}
};

}  // namespace gids::sampler
