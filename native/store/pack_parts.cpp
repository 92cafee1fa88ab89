#include "store/pack_parts.h"

#include <algorithm>
#include <vector>

namespace gids::store {

namespace {

constexpr size_t voters = 64;  // in-neighbors that vote, at most

}  // namespace

void add_weights(const u32* labels, const float* values, size_t n, size_t load, size_t load_count,
                 float* weights) noexcept {
  for (size_t i = 0; i < n; ++i) weights[size_t{labels[i]} * load_count + load] += values[i];
}

void pack(const u32* order, size_t n, const float* weights, std::span<const double> totals, double most, u32 part_count,
          double* loads, u16* parts) {
  const size_t count = totals.size();
  std::vector<double> scaled(count);
  for (size_t i = 0; i < n; ++i) {
    const u32 item = order[i];
    if (parts[item] != no_part) continue;
    const float* weight = weights + size_t{item} * count;
    bool some = false, heavy = false;
    for (size_t d = 0; d < count; ++d) {
      some |= weight[d] > 0;
      heavy |= weight[d] > most * totals[d];
      scaled[d] = totals[d] > 0 ? weight[d] / (totals[d] * totals[d]) : 0;
    }
    if (!some || heavy) continue;
    // The part where the sum of squared shares grows least.
    u32 best = 0;
    double best_cost = 0;
    for (u32 p = 0; p < part_count; ++p) {
      double cost = 0;
      for (size_t d = 0; d < count; ++d) cost += scaled[d] * loads[size_t{p} * count + d];
      if (p == 0 || cost < best_cost) best = p, best_cost = cost;
    }
    for (size_t d = 0; d < count; ++d) loads[size_t{best} * count + d] += weight[d];
    parts[item] = static_cast<u16>(best);
  }
}

template <class Index>
size_t refine(const i64* indptr, const Index* indices, size_t edge_count, size_t node_count, const float* weights,
              std::span<const double> totals, double most, u32 part_count, double* loads, u16* parts) {
  const size_t count = totals.size();
  std::vector<u32> votes(part_count);
  size_t moved = 0;
  for (size_t v = 0; v < node_count; ++v) {
    const i64 begin = indptr[v], end = indptr[v + 1];
    if (begin < 0 || end < begin || static_cast<u64>(end) > edge_count) return ~size_t{0};
    const size_t degree = static_cast<size_t>(end - begin), stride = degree > voters ? degree / voters : 1;
    u16 found[voters];
    size_t n = 0;
    for (i64 at = begin; at < end && n < voters; at += static_cast<i64>(stride)) {
      const u64 source = static_cast<u64>(static_cast<i64>(indices[at]));
      if (source >= node_count) return ~size_t{0};
      if (source != v) ++votes[found[n++] = parts[source]];
    }
    const u16 own = parts[v];
    const float* weight = weights + v * count;
    u16 best = own;
    for (size_t i = 0; i < n; ++i) {
      const u16 part = found[i];
      if (votes[part] <= votes[best]) continue;
      bool fits = true;
      for (size_t d = 0; d < count; ++d)
        fits &= weight[d] == 0 || loads[size_t{part} * count + d] + weight[d] <= most * totals[d] / part_count;
      if (fits) best = part;
    }
    for (size_t i = 0; i < n; ++i) votes[found[i]] = 0;
    if (best == own) continue;
    for (size_t d = 0; d < count; ++d) {
      loads[size_t{own} * count + d] -= weight[d];
      loads[size_t{best} * count + d] += weight[d];
    }
    parts[v] = best;
    ++moved;
  }
  return moved;
}
template size_t refine<int>(const i64*, const int*, size_t, size_t, const float*, std::span<const double>, double, u32,
                            double*, u16*);
template size_t refine<i64>(const i64*, const i64*, size_t, size_t, const float*, std::span<const double>, double, u32,
                            double*, u16*);

}  // namespace gids::store
