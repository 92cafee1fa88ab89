#include "sampler/temporal.h"

namespace gids::sampler {

namespace {

constexpr size_t node_piece = 512;  // nodes that one thread takes at a time
constexpr u32 lanes = 64;           // nodes that are searched side by side, so that their times are fetched together
constexpr u64 few_bytes = 64;       // so many bytes of times of edges are compared one after the other

// f(values)
template <class F>
void with_type(const Times& times, const F& f) {
  if (times.wide) f(static_cast<const i64*>(times.values));
  else f(static_cast<const int*>(times.values));
}

// How many in-edges of nodes [first, first + count) are not later than their trees: binary searches in step.
template <class Value>
void count_in_time(const Frontier& frontier, const Value* values, bool of_sources, std::span<const i64> of_trees,
                   size_t first, u32 count, u64* counts) {
  const u64 few = of_sources ? 0 : few_bytes / sizeof(Value);  // a source's time is not beside the next one's
  u64 begin[lanes], low[lanes], high[lanes], at[lanes];
  i64 latest[lanes];
  u32 active[lanes], left = 0;
  const auto add = [&](u32 lane) {  // to those that are searched further
    if (high[lane] - low[lane] > few) {
      active[left++] = lane;
      at[lane] = begin[lane] + (low[lane] + high[lane]) / 2;
      of_sources ? frontier.prefetch(at[lane]) : __builtin_prefetch(&values[at[lane]], 0, 3);
    } else if (high[lane] > low[lane]) {
      __builtin_prefetch(&values[begin[lane] + low[lane]], 0, 3);
      __builtin_prefetch(&values[begin[lane] + high[lane] - 1], 0, 3);
    }
  };
  for (u32 lane = 0; lane < count; ++lane) {
    begin[lane] = static_cast<u64>(frontier.begins[first + lane]);
    latest[lane] = of_trees[frontier.trees[first + lane]];
    low[lane] = 0, high[lane] = frontier.degrees[first + lane];
    add(lane);
  }
  while (left) {
    const u32 searched = left;
    u64 value_of[lanes];
    for (u32 i = 0; i < searched; ++i) {
      const u32 lane = active[i];
      value_of[i] = of_sources ? frontier.source(at[lane]) : at[lane];
      if (of_sources) __builtin_prefetch(&values[value_of[i]], 0, 3);
    }
    left = 0;  // below i, as lanes are added again after they were compared
    for (u32 i = 0; i < searched; ++i) {
      const u32 lane = active[i];
      const u64 middle = at[lane] - begin[lane];
      const bool in_time = values[value_of[i]] <= latest[lane];
      low[lane] = in_time ? middle + 1 : low[lane];
      high[lane] = in_time ? high[lane] : middle;
      add(lane);
    }
  }
  for (u32 lane = 0; lane < count; ++lane) {
    counts[lane] = low[lane];
    for (u64 e = low[lane]; e < high[lane]; ++e) counts[lane] += values[begin[lane] + e] <= latest[lane];
  }
}

}  // namespace

void leave_out_later(HostSampler& host, const Frontier& frontier, const Times& times, std::span<const i64> of_trees,
                     u64 most) {
  if (times.of_sources && frontier.num_src == 0) return;  // every edge is a fault, as its source shows
  with_type(times, [&](const auto* values) {
    host.workers().parallel_for(frontier.size(), node_piece, [&](size_t begin, size_t end, u32) {
      u64 counts[lanes];
      for (size_t first = begin; first < end; first += lanes) {
        const u32 count = static_cast<u32>(std::min<size_t>(lanes, end - first));
        count_in_time(frontier, values, times.of_sources, of_trees, first, count, counts);
        for (u32 lane = 0; lane < count; ++lane) {
          const u64 kept = std::min(counts[lane], most);
          host.bound(first + lane, frontier.begins[first + lane] + static_cast<i64>(counts[lane] - kept), kept);
        }
      }
    });
  });
}

}  // namespace gids::sampler
