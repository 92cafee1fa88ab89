#include "packs/counts.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace gids::packs {

u64 Counts::add(std::span<const u32> rows) {
  for (const u32 row : rows)
    if (row >= counts_.size())
      throw std::out_of_range("row " + std::to_string(row) + " is outside a table of " +
                              std::to_string(counts_.size()) + " rows");
  constexpr size_t ahead = 16;  // rows whose counts are on their way to the processor
  u64 distinct = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i + ahead < rows.size()) __builtin_prefetch(&counts_[rows[i + ahead]], 1);
    const u32 row = rows[i];
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
  for (u64 first = 0; first < counts_.size(); first += 64) {
    const u64 end = std::min<u64>(counts_.size(), first + 64);
    u64 word = 0;
    for (u64 row = first; row < end; ++row) word |= u64{is_hot(static_cast<u32>(row), hot)} << (row - first);
    set.insert_word(first / 64, word);
  }
  set.seal();
  return set;
}

}  // namespace gids::packs
