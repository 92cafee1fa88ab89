#include "packs/row_set.h"

#include <algorithm>

namespace gids::packs {

void RowSet::clear() {
  std::fill(words_.begin(), words_.end(), 0);
  ranks_.clear();
  size_ = 0;
}

void RowSet::seal() {
  ranks_.resize(words_.size());
  u32 below = 0;  // a set has fewer than 2^32 rows, because rows are numbers of 32 bits
  for (size_t w = 0; w < words_.size(); ++w) {
    ranks_[w] = below;
    below += static_cast<u32>(std::popcount(words_[w]));
  }
}

bool RowSet::any(u64 begin, u64 end) const {
  for (u64 w = begin / 64; w * 64 < end; ++w) {
    u64 word = words_[w];
    if (w == begin / 64) word &= ~u64{0} << (begin % 64);
    if (w == end / 64) word &= (u64{1} << (end % 64)) - 1;
    if (word) return true;
  }
  return false;
}

}  // namespace gids::packs
