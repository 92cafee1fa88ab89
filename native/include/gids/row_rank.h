// A set of rows as a bitmap, and the rank of a row in it: the number of its rows below. A pack's rows are in memory in
// this order. Called by packs::RowSet and by the kernel that gathers from packs. Knows addresses and numbers only.
#pragma once

#include "gids/target.h"

#if !defined(__CUDACC__) && !defined(__CUDACC_RTC__)
#include <bit>
#endif

namespace gids {

// words: a bit for each row. ranks: for each word, the rows of the set in the words before it.
struct RankedRows {
  const u64* words;
  const u32* ranks;

  GIDS_HD bool contains(u64 row) const { return words[row / 64] >> (row % 64) & 1; }
  // Of a row of the set.
  GIDS_HD u64 rank(u64 row) const { return ranks[row / 64] + bits(words[row / 64] & ((u64{1} << (row % 64)) - 1)); }

  GIDS_HD static u32 bits(u64 word) {
#if defined(__CUDA_ARCH__)
    return static_cast<u32>(__popcll(word));
#else
    return static_cast<u32>(std::popcount(word));
#endif
  }
};

}  // namespace gids
