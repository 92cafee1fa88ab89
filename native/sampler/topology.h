// The relations that a sampler walks over, as arrays. Called by the samplers; knows nothing of files. The arrays'
// values are checked where they are used, never trusted.
#pragma once

#include <string>
#include <vector>

#include "gids/target.h"

namespace gids::sampler {

// In-edges by destination: those of node v are at positions indptr[v] to indptr[v + 1] of the indices.
struct Relation {
  const i64* indptr;
  const void* indices;  // int32, or int64 if wide
  bool wide;
  u64 num_edges;
  u32 src, dst;  // node types
  std::string name;
};

struct NodeType {
  u64 count;
  std::string name;
};

struct Topology {
  std::vector<NodeType> node_types;
  std::vector<Relation> relations;
};

}  // namespace gids::sampler
