// The nodes of one type in the minibatch being made: in order of first appearance, each with its local id. Called
// by the samplers, which relabel their edges here.
#pragma once

#include <span>

#include "cache/workers.h"
#include "gids/id_map.h"
#include "sampler/scratch.h"

namespace gids::sampler {

class NodeSet {
 public:
  // Starts a minibatch. Repeated seeds keep one local id each; edges refer to the first.
  void start(std::span<const i64> seeds);

  // Replaces ids, each below id_map::max_ids, by local ids; new nodes get the next ones, in order of appearance.
  // The result does not depend on the number of threads.
  void relabel(i64* ids, size_t n, cache::Workers& workers);

  std::span<const i64> nodes() const { return {nodes_.data(), count_}; }
  size_t size() const { return count_; }
  size_t bytes() const { return nodes_.bytes() + slots_.bytes() + slot_of_.bytes() + first_.bytes(); }

 private:
  void relabel_in_turn(i64* ids, size_t n);
  void relabel_at_once(i64* ids, size_t n, cache::Workers& workers);
  void reserve(size_t count);  // slots for so many nodes

  Scratch<i64> nodes_;
  size_t count_ = 0;
  HugeArray<u64> slots_;
  u32 log2_slots_ = 0;
  Scratch<u32> slot_of_;   // of each id
  Scratch<u8> first_;      // whether it appears for the first time
  Scratch<u64> new_nodes_;  // by piece, then before each piece
};

}  // namespace gids::sampler
