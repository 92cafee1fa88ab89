// Counting sources, sorting edges, carrying visits: one pass each, in the order of the input.
#include "store/topology.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace gids::store {

template <class Index>
size_t count_sources(const Index* indices, size_t n, i64 limit, i64 first, size_t count, u32* counts) noexcept {
  for (size_t at = 0; at < n; ++at) {
    const i64 index = indices[at];
    if (index < 0 || index >= limit) return at;
    const u64 slot = static_cast<u64>(index - first);  // wraps when index < first, and is then too large
    if (slot < count && counts[slot] != ~u32{0}) ++counts[slot];
  }
  return all_in_range;
}
template size_t count_sources<int>(const int*, size_t, i64, i64, size_t, u32*) noexcept;
template size_t count_sources<long>(const long*, size_t, i64, i64, size_t, u32*) noexcept;

size_t sort_edges(const i64* sources, const i64* destinations, const i64* ids, size_t n, i64 first, size_t count,
                  i64* offsets, i64* sorted_sources, i64* sorted_ids) noexcept {
  std::fill_n(offsets, count + 1, 0);
  for (size_t at = 0; at < n; ++at) {
    const u64 slot = static_cast<u64>(destinations[at] - first);
    if (slot >= count) return at;
    ++offsets[slot + 1];
  }
  for (size_t slot = 0; slot < count; ++slot) offsets[slot + 1] += offsets[slot];
  // offsets[slot] now walks through its destination's range and ends where the next one begins.
  for (size_t at = 0; at < n; ++at) {
    const i64 to = offsets[destinations[at] - first]++;
    sorted_sources[to] = sources[at];
    sorted_ids[to] = ids[at];
  }
  for (size_t slot = count; slot > 0; --slot) offsets[slot] = offsets[slot - 1];
  offsets[0] = 0;
  return all_in_range;
}

void sort_neighbors(const i64* offsets, size_t count, i64* sources, i64* ids) {
  std::vector<std::pair<i64, i64>> pairs;
  for (size_t slot = 0; slot < count; ++slot) {
    const i64 begin = offsets[slot], end = offsets[slot + 1];
    if (std::is_sorted(sources + begin, sources + end)) continue;
    pairs.clear();
    for (i64 at = begin; at < end; ++at) pairs.emplace_back(sources[at], ids[at]);
    std::stable_sort(pairs.begin(), pairs.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (i64 at = begin; at < end; ++at) {
      sources[at] = pairs[static_cast<size_t>(at - begin)].first;
      ids[at] = pairs[static_cast<size_t>(at - begin)].second;
    }
  }
}

template <class Index>
size_t carry_to_sources(const i64* indptr, size_t count, const Index* indices, size_t edge_count, const double* shares,
                        double* visits, size_t source_count) noexcept {
  for (size_t v = 0; v < count; ++v) {
    const i64 begin = indptr[v], end = indptr[v + 1];
    if (begin < 0 || end < begin || static_cast<u64>(end) > edge_count) return bad_indptr;
    const double share = shares[v];
    if (share == 0) continue;  // most nodes, in the first hops from few seeds
    for (i64 at = begin; at < end; ++at) {
      const u64 source = static_cast<u64>(static_cast<i64>(indices[at]));  // negative: too large
      if (source >= source_count) return static_cast<size_t>(at);
      visits[source] += share;
    }
  }
  return all_in_range;
}
template size_t carry_to_sources<int>(const i64*, size_t, const int*, size_t, const double*, double*, size_t) noexcept;
template size_t carry_to_sources<long>(const i64*, size_t, const long*, size_t, const double*, double*,
                                       size_t) noexcept;

}  // namespace gids::store
