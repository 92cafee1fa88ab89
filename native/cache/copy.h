// Copying rows that lie scattered into rows of an output. Called by PageCache; knows addresses only.
#pragma once

#include <cstddef>

#include "gids/target.h"

namespace gids::cache {

// Copies from[i] to to[i], `row_bytes` each. streaming: write past the processor's cache, for outputs larger
// than it; ordinary stores would first read what they overwrite.
void copy_rows(const std::byte* const* from, std::byte* const* to, size_t rows, size_t row_bytes, bool streaming);

// Outputs from this size on are written past the processor's cache.
constexpr size_t streaming_bytes = 8u << 20;

}  // namespace gids::cache
