// The nodes of one type in the minibatch being made: in order of first appearance, each with its local id. Called
// by the samplers, which relabel their edges here.
#pragma once

#include <span>

#include "cache/workers.h"
#include "gids/id_map.h"
#include "sampler/scratch.h"

namespace gids::sampler {

// in_trees: a node of two trees is two nodes.
template <bool in_trees>
class BasicNodeSet {
 public:
  // Starts a minibatch. Repeated seeds keep one local id each; edges refer to the first. trees: of each seed.
  void start(std::span<const i64> seeds, const i64* trees = nullptr);

  // Replaces ids, each below id_map::max_ids, by local ids; new nodes get the next ones, in order of appearance.
  // The result does not depend on the number of threads. trees: of each id.
  void relabel(i64* ids, size_t n, cache::Workers& workers, const u32* trees = nullptr);

  // The local id of a node, or `none`.
  static constexpr u64 none = ~u64{0};
  u64 find(u64 id, u64 tree) const;

  std::span<const i64> nodes() const { return {nodes_.data(), count_}; }
  const u32* trees() const { return trees_.data(); }  // of each node
  size_t size() const { return count_; }
  size_t bytes() const {
    return nodes_.bytes() + trees_.bytes() + slots_.bytes() + slot_of_.bytes() + first_.bytes() + new_nodes_.bytes();
  }

 private:
  void relabel_in_turn(i64* ids, const u32* trees, size_t n);
  void relabel_at_once(i64* ids, const u32* trees, size_t n, cache::Workers& workers);
  void reserve(size_t count);    // slots for so many nodes
  void make_room(size_t count);  // for so many nodes in the lists
  void add(i64 id, u64 tree, size_t at);

  Scratch<i64> nodes_;
  Scratch<u32> trees_;
  size_t count_ = 0;
  HugeArray<u64> slots_;
  u32 log2_slots_ = 0;
  Scratch<u32> slot_of_;    // of each id
  Scratch<u8> first_;       // whether it appears for the first time
  Scratch<u64> new_nodes_;  // by piece, then before each piece
};

using NodeSet = BasicNodeSet<false>;
using TreeSet = BasicNodeSet<true>;

}  // namespace gids::sampler
