// CRC32C (Castagnoli), the checksum of pages and files. Called by the writer, by `gids verify` and by
// readers that check what they read. Knows bytes only.
#pragma once

#include <cstddef>

#include "gids/target.h"

namespace gids::store {

// The checksum of `bytes` bytes that follow data whose checksum is `crc` (0: nothing came before).
// Uses SSE4.2 where the processor has it; both ways give the same number.
u32 crc32c(const std::byte* data, size_t bytes, u32 crc = 0) noexcept;

// One checksum per page. Several pages are in flight at once: the instruction answers after three
// cycles but one can start in every cycle, so one stream alone would use a third of the unit.
void crc32c_pages(const std::byte* pages, size_t count, size_t page_bytes, u32* out) noexcept;

// The same number without the instruction; what other processors run and what the tests compare with.
u32 crc32c_portable(const std::byte* data, size_t bytes, u32 crc = 0) noexcept;

}  // namespace gids::store
