#include "sampler/least.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace gids::sampler {

std::vector<Candidate>& no_candidates() {
  static thread_local std::vector<Candidate> candidates;
  candidates.clear();
  return candidates;
}

void settle(std::vector<Candidate>& candidates, u64 k) {
  const auto end = candidates.begin() + static_cast<std::ptrdiff_t>(k);
  std::nth_element(candidates.begin(), end, candidates.end());
  std::sort(candidates.begin(), end, [](const Candidate& a, const Candidate& b) { return a.edge < b.edge; });
}

void take_least(const Frontier& frontier, size_t v, u64 k, const Variates& variates, Numbered numbered, float weight,
                EdgeList& list) {
  const u64 degree = frontier.degrees[v], begin = static_cast<u64>(frontier.begins[v]);
  const bool by_edge = numbered == Numbered::edges;
  // Below this limit there nearly always are more than k, and few.
  const double wanted = static_cast<double>(k) + 4 * std::sqrt(static_cast<double>(k)) + 8;
  const double most = wanted / static_cast<double>(degree);
  u64 limit = most < 1 ? static_cast<u64>(most * 0x1p64) : ~u64{0};
  auto& candidates = no_candidates();
  Lanes node = {};
  for (;; limit = ~u64{0}, candidates.clear()) {
    for (u64 first = 0; first < degree; first += draw_lanes) {
      const u32 count = static_cast<u32>(std::min<u64>(draw_lanes, degree - first));
      if (by_edge)
        for (u32 lane = 0; lane < count; ++lane) node[lane] = first + lane;
      else frontier.sources(begin + first, count, node);
      for (u32 below = variates.below(node, count, limit); below; below &= below - 1) {
        const u32 lane = static_cast<u32>(std::countr_zero(below));
        candidates.push_back({unit(variates.of_node(node[lane])), first + lane, node[lane]});
      }
    }
    if (candidates.size() > k) break;
    if (limit != ~u64{0}) continue;
    candidates.clear();  // some number is all ones, which is below no limit
    for (u64 e = 0; e < degree; ++e) {
      const u64 source = frontier.source(begin + e);
      candidates.push_back({unit(variates.of_node(by_edge ? e : source)), e, source});
    }
    break;
  }
  settle(candidates, k);
  list.reserve(k);
  for (u64 i = 0; i < k; ++i) {
    const auto& [rank, edge, source] = candidates[i];
    list.add(by_edge ? frontier.source(begin + edge) : source, begin + edge, weight);
  }
}

}  // namespace gids::sampler
