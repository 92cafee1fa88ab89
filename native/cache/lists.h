// Lines in order of worth: one doubly linked list per bucket, so that the cost of taking the least worthy lines
// depends only on their number. Called by the planner; a page is a number here.
//
// A line is in one list, or in none while a planned minibatch needs it (or while it is free). Its owner, the
// page that it holds, is stored beside its links: both are needed together, and each is a cache miss.
//
// Following links is one dependent cache miss after another. So each line also remembers which line was
// pushed `hint_distance` after it: a hint for prefetching, free to be stale, worth a factor of three once
// the lines' metadata is larger than the processor's cache.
#pragma once

#include <array>
#include <stdexcept>
#include <vector>

#include "cache/memory.h"
#include "gids/page_word.h"

namespace gids::cache {

class BucketLists {
 public:
  static constexpr size_t node_bytes = 16;  // metadata of a line
  static constexpr u64 max_pages = u64{1} << (64 - word::line_bits);

  BucketLists(u32 lines, u32 buckets) : lines_(lines), nodes_(size_t{lines} + buckets), heads_(buckets) {
    for (u32 b = 0; b < buckets; ++b) clear(b);
  }

  u32 count(u32 bucket) const { return heads_[bucket].count; }
  size_t bytes() const { return nodes_.bytes() + heads_.size() * sizeof(Head); }

  u64 owner(u32 line) const { return nodes_[line].owner_and_hint >> word::line_bits; }
  void set_owner(u32 line, u64 page) {
    u64& v = nodes_[line].owner_and_hint;
    v = page << word::line_bits | (v & word::line_mask);
  }

  void push_back(u32 line, u32 bucket) {
    const u32 end = lines_ + bucket, last = nodes_[end].prev;
    nodes_[line].prev = last;
    nodes_[line].next = end;
    nodes_[last].next = line;
    nodes_[end].prev = line;
    Head& head = heads_[bucket];
    ++head.count;
    u32& earlier = head.recent[head.pushed++ % hint_distance];
    u64& v = nodes_[earlier].owner_and_hint;
    v = (v & ~word::line_mask) | line;
    earlier = line;
  }

  void remove(u32 line, u32 bucket) {
    const Node n = nodes_[line];
    nodes_[n.prev].next = n.next;
    nodes_[n.next].prev = n.prev;
    --heads_[bucket].count;
  }

  // Takes the `n` lines that have been longest in the bucket; f(line, owner) for each.
  template <class F>
  void take(u32 bucket, u32 n, F&& f) {
    const u32 end = lines_ + bucket;
    u32 line = nodes_[end].next;
    for (u32 i = 0; i < n; ++i) {
      const Node& node = nodes_[line];
      prefetch(static_cast<u32>(node.owner_and_hint & word::line_mask));
      f(line, node.owner_and_hint >> word::line_bits);
      line = node.next;
    }
    nodes_[end].next = line;
    nodes_[line].prev = end;
    heads_[bucket].count -= n;
  }

  // Forgets a whole bucket at once; its lines are in no list from then on.
  void clear(u32 bucket) {
    const u32 end = lines_ + bucket;
    nodes_[end].prev = nodes_[end].next = end;
    heads_[bucket].count = 0;
  }

  void prefetch(u32 line) const { __builtin_prefetch(&nodes_[line], 1, 3); }
  void prefetch_neighbors(u32 line) const {
    __builtin_prefetch(&nodes_[nodes_[line].prev], 1, 3);
    __builtin_prefetch(&nodes_[nodes_[line].next], 1, 3);
  }

 private:
  static constexpr u32 hint_distance = 8;

  struct Node {
    u64 owner_and_hint;  // page in the high 34 bits, a line in the low 30
    u32 prev, next;
  };
  static_assert(sizeof(Node) == node_bytes, "four lines of the cache to a line of the processor's");

  struct Head {
    u32 count = 0, pushed = 0;
    std::array<u32, hint_distance> recent{};  // the lines pushed last, oldest at pushed % hint_distance
  };

  u32 lines_;
  HugeArray<Node> nodes_;  // [lines] then one end per bucket
  std::vector<Head> heads_;
};

}  // namespace gids::cache
