#include "packs/counts.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace gids::packs {

u64 Counts::add(std::span<const u32> rows) {
  for (const u32 row : rows)
    if (row >= counts_.size())
      throw std::out_of_range("row " + std::to_string(row) + " is outside a table of " + std::to_string(counts_.size()) + " rows");
  u64 distinct = 0;
  for (const u32 row : rows) {
    if (!seen_.insert(row)) continue;
    ++distinct;
    if (counts_[row] < most) ++counts_[row];
  }
  for (const u32 row : rows) seen_.erase(row);
  return distinct;
}

std::vector<u64> Counts::histogram() const {
  std::vector<u64> found(1);
  for (const u16 count : counts_) {
    if (count >= found.size()) found.resize(count + size_t{1});
    ++found[count];
  }
  return found;
}

Hot Counts::hottest(u64 rows) const {
  const std::vector<u64> by_count = histogram();
  for (size_t count = by_count.size(); count-- > 1;) {
    if (by_count[count] <= rows) {
      rows -= by_count[count];
      continue;
    }
    Hot hot{static_cast<u16>(count), 0};
    for (u32 row = 0; rows && row < counts_.size(); ++row) {
      if (counts_[row] != count) continue;
      hot.before = row + 1;
      --rows;
    }
    return hot;
  }
  return {0, 0};  // every wanted row
}

RowSet Counts::set_of(const Hot& hot) const {
  RowSet set(counts_.size());
  for (u32 row = 0; row < counts_.size(); ++row)
    if (is_hot(row, hot)) set.insert(row);
  set.seal();
  return set;
}

}  // namespace gids::packs
