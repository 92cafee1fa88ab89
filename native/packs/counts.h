// How many minibatches of a superbatch want each row of a table. The rows that most of them want stay in memory.
// Called while a superbatch is sampled; knows numbers only.
#pragma once

#include <span>
#include <vector>

#include "packs/row_set.h"

namespace gids::packs {

// The rows wanted by more than `above` minibatches, and those wanted by exactly `above` whose number is below
// `before`: so a limit of bytes is met to the row.
struct Hot {
  u16 above = 0xFFFF;
  u32 before = 0;
};

class Counts {
 public:
  static constexpr u32 most = 0xFFFF;  // a count stays there

  explicit Counts(u64 row_count) : counts_(row_count), seen_(row_count) {}

  // Counts a minibatch's rows, each once. Returns how many distinct rows it has.
  // Throws std::out_of_range for a row beyond the table.
  u64 add(std::span<const u32> rows);

  // How many rows were wanted by 0, 1, 2, … minibatches.
  std::vector<u64> histogram() const;
  // The `rows` most wanted rows; of equally wanted ones the first.
  Hot hottest(u64 rows) const;
  bool is_hot(u32 row, const Hot& hot) const {
    const u16 count = counts_[row];
    return (count > hot.above) | ((count == hot.above) & (row < hot.before));  // no branch: it could not be predicted
  }
  RowSet set_of(const Hot& hot) const;  // sealed

  u64 row_count() const { return counts_.size(); }
  size_t bytes() const { return counts_.size() * sizeof(u16) + seen_.bytes(); }

 private:
  std::vector<u16> counts_;
  RowSet seen_;  // by the minibatch that is counted
};

}  // namespace gids::packs
