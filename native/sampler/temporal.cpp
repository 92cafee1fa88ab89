#include "sampler/temporal.h"

namespace gids::sampler {

namespace {

constexpr size_t node_piece = 512;  // nodes that one thread takes at a time
constexpr size_t nodes_ahead = 8;   // nodes whose in-edges' times are fetched while another's are compared
constexpr u64 few = 16;             // so many times are compared one after the other: no branch is mispredicted
constexpr size_t edges_ahead = 16;

// f(values)
template <class F>
void with_type(const Times& times, const F& f) {
  if (times.wide)
    f(static_cast<const i64*>(times.values));
  else
    f(static_cast<const int*>(times.values));
}

template <class TimeOf>
u64 count_until(const TimeOf& time_of, u64 begin, u64 degree, i64 latest) {
  u64 low = 0, high = degree;  // the first `low` are not later, those from `high` on are
  while (high - low > few) {
    const u64 middle = (low + high) / 2;
    (time_of(begin + middle) <= latest ? low : high) = middle;
  }
  u64 count = low;
  for (u64 e = low; e < high; ++e) count += time_of(begin + e) <= latest;
  return count;
}

void raise_later(const Frontier& frontier, const FirstFault& later) {
  if (later.at() != FirstFault::none)
    throw BadTopology(frontier.relation, "the in-edges around position " + std::to_string(later.at()) +
                                             " are not in the order of their times");
}

}  // namespace

void leave_out_later(HostSampler& host, const Frontier& frontier, const Times& times, std::span<const i64> of_trees,
                     u64 most) {
  with_type(times, [&](const auto* values) {
    host.workers().parallel_for(frontier.size(), node_piece, [&](size_t first, size_t last, u32) {
      for (size_t v = first; v < last; ++v) {
        const u64 begin = static_cast<u64>(frontier.begins[v]), degree = frontier.degrees[v];
        if (v + nodes_ahead < last) {
          const u64 ahead = static_cast<u64>(frontier.begins[v + nodes_ahead]);
          if (times.of_sources)
            frontier.prefetch(ahead);
          else
            __builtin_prefetch(&values[ahead], 0, 3);
        }
        const i64 latest = of_trees[frontier.trees[v]];
        u64 count;
        if (times.of_sources)
          count = count_until([&](u64 p) { return values[frontier.source(p)]; }, begin, degree, latest);
        else
          count = count_until([&](u64 p) { return values[p]; }, begin, degree, latest);
        const u64 kept = std::min(count, most);
        host.bound(v, static_cast<i64>(begin + count - kept), kept);
      }
    });
  });
}

void check_times(HostSampler& host, const Frontier& frontier, const Times& times, std::span<const i64> of_trees,
                 const Block& block) {
  FirstFault later;
  const i64* of_edge = times.of_sources ? block.indices : block.positions;
  with_type(times, [&](const auto* values) {
    host.workers().parallel_for(frontier.size(), node_piece, [&](size_t first, size_t last, u32) {
      const size_t end = static_cast<size_t>(block.indptr[last]);
      for (size_t v = first; v < last; ++v) {
        const i64 latest = of_trees[frontier.trees[v]];
        for (size_t e = static_cast<size_t>(block.indptr[v]); e < static_cast<size_t>(block.indptr[v + 1]); ++e) {
          if (e + edges_ahead < end) __builtin_prefetch(&values[of_edge[e + edges_ahead]], 0, 3);
          if (values[of_edge[e]] > latest) later.note(static_cast<u64>(block.positions[e]));
        }
      }
    });
  });
  raise_later(frontier, later);
}

void check_times(HostSampler& host, const Frontier& frontier, const Times& times, std::span<const i64> of_trees) {
  FirstFault later;
  with_type(times, [&](const auto* values) {
    host.workers().parallel_for(frontier.size(), node_piece, [&](size_t first, size_t last, u32) {
      for (size_t v = first; v < last; ++v) {
        const u64 begin = static_cast<u64>(frontier.begins[v]), end = begin + frontier.degrees[v];
        for (u64 position = begin; position < end; ++position)
          if (values[times.of_sources ? frontier.source(position) : position] > of_trees[frontier.trees[v]])
            later.note(position);
      }
    });
  });
  raise_later(frontier, later);
}

}  // namespace gids::sampler
