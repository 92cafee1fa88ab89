// The destinations of one relation in one layer, and their in-edges. Made by HostSampler; the samplers choose among
// these edges, and read sources through here, where they are checked.
#pragma once

#include <atomic>
#include <span>
#include <string>

#include "gids/forest.h"
#include "sampler/minibatch.h"

namespace gids::sampler {

// The least position where something is wrong.
class FirstFault {
 public:
  static constexpr u64 none = ~u64{0};
  void note(u64 at) {
    u64 held = at_.load(std::memory_order_relaxed);
    while (at < held && !at_.compare_exchange_weak(held, at, std::memory_order_relaxed)) {
    }
  }
  u64 at() const { return at_.load(std::memory_order_relaxed); }

 private:
  std::atomic<u64> at_{none};
};

struct Frontier {
  const Relation& relation;
  u64 num_src;  // nodes of the source type
  std::span<const i64> nodes;
  const i64* begins;  // of each node's in-edges among the relation's indices
  const u64* degrees;
  FirstFault& bad_edge;        // the least position of a source that is no node
  const u32* trees = nullptr;  // of each node, or null: the nodes are in no trees
  const u32* tags = nullptr;   // of each tree

  size_t size() const { return nodes.size(); }
  // What a node's random numbers are numbered by.
  u64 drawn_as(size_t v) const {
    const u64 node = static_cast<u64>(nodes[v]);
    return trees ? forest::drawn_as(node, tags[trees[v]]) : node;
  }

  void prefetch(u64 position) const {
    const size_t bytes = relation.wide ? 8 : 4;
    __builtin_prefetch(static_cast<const std::byte*>(relation.indices) + position * bytes, 0, 3);
  }
  // The source of the edge at a position; if it is out of range, notes a fault and returns 0.
  u64 source(u64 position) const {
    return relation.wide ? checked(static_cast<const i64*>(relation.indices), position)
                         : checked(static_cast<const int*>(relation.indices), position);
  }
  // The sources of `count` edges from a position on.
  void sources(u64 position, u32 count, u64* out) const {
    if (relation.wide) read(static_cast<const i64*>(relation.indices), position, count, out);
    else read(static_cast<const int*>(relation.indices), position, count, out);
  }

 private:
  template <class Index>
  void read(const Index* indices, u64 position, u32 count, u64* out) const {
    bool bad = false;
    for (u32 i = 0; i < count; ++i) {
      out[i] = static_cast<u64>(static_cast<i64>(indices[position + i]));
      bad |= out[i] >= num_src;
    }
    if (bad)
      for (u32 i = 0; i < count; ++i) out[i] = checked(indices, position + i);
  }
  template <class Index>
  u64 checked(const Index* indices, u64 position) const {
    const u64 found = static_cast<u64>(static_cast<i64>(indices[position]));
    if (found < num_src) return found;
    bad_edge.note(position);
    return 0;
  }
};

}  // namespace gids::sampler
