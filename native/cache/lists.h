// Lines in order of worth: one doubly linked list per bucket, so that taking the least worthy lines costs
// as much as is taken, however many lines there are. Called by the planner; knows nothing of pages.
//
// A line is in one list, or in none while a planned minibatch needs it (or while it is free).
#pragma once

#include "cache/memory.h"
#include "gids/target.h"

namespace gids::cache {

class BucketLists {
 public:
  BucketLists(u32 lines, u32 buckets) : lines_(lines), nodes_(size_t{lines} + buckets), counts_(buckets) {
    for (u32 b = 0; b < buckets; ++b) clear(b);
  }

  u32 count(u32 bucket) const { return counts_[bucket]; }
  size_t bytes() const { return nodes_.bytes() + counts_.bytes(); }

  void push_back(u32 line, u32 bucket) {
    const u32 head = lines_ + bucket, last = nodes_[head].prev;
    nodes_[line] = {last, head};
    nodes_[last].next = line;
    nodes_[head].prev = line;
    ++counts_[bucket];
  }

  void remove(u32 line, u32 bucket) {
    const Node n = nodes_[line];
    nodes_[n.prev].next = n.next;
    nodes_[n.next].prev = n.prev;
    --counts_[bucket];
  }

  // Takes the `n` lines that have been longest in the bucket; f(line) for each.
  template <class F>
  void take(u32 bucket, u32 n, F&& f) {
    const u32 head = lines_ + bucket;
    u32 line = nodes_[head].next;
    for (u32 i = 0; i < n; ++i) {
      const u32 next = nodes_[line].next;
      f(line);
      line = next;
    }
    nodes_[head].next = line;
    nodes_[line].prev = head;
    counts_[bucket] -= n;
  }

  // Forgets a whole bucket at once; its lines are in no list from then on.
  void clear(u32 bucket) {
    const u32 head = lines_ + bucket;
    nodes_[head] = {head, head};
    counts_[bucket] = 0;
  }

  void prefetch(u32 line) const { __builtin_prefetch(&nodes_[line], 1, 3); }
  void prefetch_neighbours(u32 line) const {
    __builtin_prefetch(&nodes_[nodes_[line].prev], 1, 3);
    __builtin_prefetch(&nodes_[nodes_[line].next], 1, 3);
  }

 private:
  struct Node {
    u32 prev, next;
  };
  static_assert(sizeof(Node) == 8, "with the owner, 16 bytes a line");

  u32 lines_;
  HugeArray<Node> nodes_;  // [lines] then one head per bucket
  HugeArray<u32> counts_;
};

}  // namespace gids::cache
