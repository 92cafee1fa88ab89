// Copying rows that lie scattered into rows of an output. Called by PageCache; knows addresses only.
#pragma once

#include <algorithm>
#include <cstddef>

#include "gids/target.h"

namespace gids::cache {

// Copies from[i] to to[i], `row_bytes` each. streaming: write past the processor's cache, for outputs larger
// than it; ordinary stores would first read what they overwrite.
void copy_rows(const std::byte* const* from, std::byte* const* to, size_t rows, size_t row_bytes, bool streaming);

constexpr size_t rows_ahead = 4;  // rows whose first bytes are fetched while another is copied

inline void prefetch_row(const std::byte* row, size_t row_bytes) {
  constexpr size_t cache_line = 64, most = 1024;  // beyond that the processor has seen the pattern
  for (size_t b = 0; b < std::min(row_bytes, most); b += cache_line) __builtin_prefetch(row + b, 0, 0);
}

// Outputs from this size on are written past the processor's cache.
constexpr size_t streaming_bytes = 8u << 20;

}  // namespace gids::cache
