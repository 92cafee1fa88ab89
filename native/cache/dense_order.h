// Where values belong in sorted order, without comparisons, if they are close together: the pages of a run are.
// Called by PageCache; knows numbers only.
#pragma once

#include <algorithm>
#include <vector>

#include "gids/target.h"

namespace gids::cache {

// place[i] of key(i), for i below n; equal keys keep their order. Empty if the keys are too far apart.
template <class Key>
std::vector<u32> dense_order(size_t n, const Key& key) {
  constexpr u64 most_apart = 16;  // counters for each value
  u64 least = ~u64{0}, most = 0;
  for (size_t i = 0; i < n; ++i) {
    least = std::min<u64>(least, key(i));
    most = std::max<u64>(most, key(i));
  }
  if (n == 0 || most - least >= most_apart * n) return {};
  std::vector<u32> next(most - least + 2), place(n);
  for (size_t i = 0; i < n; ++i) ++next[key(i) - least + 1];
  for (size_t k = 1; k < next.size(); ++k) next[k] += next[k - 1];
  for (size_t i = 0; i < n; ++i) place[i] = next[key(i) - least]++;
  return place;
}

}  // namespace gids::cache
