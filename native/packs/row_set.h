// The rows of a table that a pack holds, as a bitmap. A row's position in the pack is its rank: the number of
// rows below it. Called by the cutter, the sweep and the gather; knows numbers only.
#pragma once

#include <bit>
#include <cstddef>
#include <span>
#include <vector>

#include "gids/row_rank.h"
#include "gids/target.h"

namespace gids::packs {

// Filled by insert(), then sealed: only then are there ranks. A row takes 1 bit, and half a bit for the ranks.
class RowSet {
 public:
  explicit RowSet(u64 row_count) : row_count_(row_count), words_(div_ceil(row_count, 64)) {}

  u64 row_count() const { return row_count_; }
  u64 size() const { return size_; }
  bool contains(u32 row) const { return ranked().contains(row); }
  // The set as kernels see it. Ranks only once it is sealed.
  RankedRows ranked() const { return {words_.data(), ranks_.data()}; }
  u64 word_count() const { return words_.size(); }
  bool sealed() const { return ranks_.size() == words_.size(); }

  // True if the row was not in the set.
  bool insert(u32 row) {
    u64& word = words_[row / 64];
    const u64 bit = u64{1} << (row % 64);
    if (word & bit) return false;
    word |= bit;
    ++size_;
    return true;
  }
  // Rows 64 * w to 64 * w + 63, of which none is in the set yet, by the bits of a word.
  void insert_word(u64 w, u64 word) {
    words_[w] = word;
    size_ += static_cast<u64>(std::popcount(word));
  }
  void erase(u32 row) {
    u64& word = words_[row / 64];
    const u64 bit = u64{1} << (row % 64);
    if (word & bit) --size_;
    word &= ~bit;
  }
  void clear();
  void seal();

  // Of a row of a sealed set.
  u64 rank(u32 row) const { return ranked().rank(row); }
  void prefetch(u32 row) const {
    __builtin_prefetch(&words_[row / 64]);
    __builtin_prefetch(&ranks_[row / 64]);
  }

  // Calls f(row) for each row in [begin, end), ascending.
  template <class F>
  void each(u64 begin, u64 end, F f) const {
    for (u64 w = begin / 64; w * 64 < end; ++w) {
      u64 word = words_[w];
      if (w == begin / 64) word &= ~u64{0} << (begin % 64);
      if (w == end / 64) word &= (u64{1} << (end % 64)) - 1;
      for (; word; word &= word - 1) f(w * 64 + static_cast<u64>(std::countr_zero(word)));
    }
  }
  // Whether a row of [begin, end) is in the set.
  bool any(u64 begin, u64 end) const;

  size_t bytes() const { return words_.size() * sizeof(u64) + ranks_.size() * sizeof(u32); }
  // Bytes of a sealed set of this many rows.
  static u64 bytes_of(u64 row_count) { return div_ceil(row_count, 64) * (sizeof(u64) + sizeof(u32)); }

 private:
  u64 row_count_;
  u64 size_ = 0;
  std::vector<u64> words_;
  std::vector<u32> ranks_;  // rows in the words before each word
};

}  // namespace gids::packs
