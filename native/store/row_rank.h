// A set of rows as a bitmap, and the rank of a row in it: the number of its rows below. Called by HeldRows. Knows
// addresses and numbers only.
#pragma once

#include <bit>

#include "gids/target.h"

namespace gids::store {

// words: a bit for each row. ranks: for each word, the rows of the set in the words before it.
struct RankedRows {
  const u64* words;
  const u32* ranks;

  bool contains(u64 row) const { return words[row / 64] >> (row % 64) & 1; }
  // Of a row of the set.
  u64 rank(u64 row) const {
    return ranks[row / 64] + static_cast<u32>(std::popcount(words[row / 64] & ((u64{1} << (row % 64)) - 1)));
  }
};

}  // namespace gids::store
