// CRC32C by table (eight bytes a step) and by the SSE4.2 instruction, chosen once at run time.
#include "store/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace gids::store {
namespace {

constexpr u32 polynomial = 0x82f63b78u;  // Castagnoli, bits reversed

// tables[k][b]: what byte b adds to the checksum once k more bytes have followed it.
constexpr auto make_tables() {
  std::array<std::array<u32, 256>, 8> tables{};
  for (u32 byte = 0; byte < 256; ++byte) {
    u32 crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? polynomial : 0);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < 8; ++k)
    for (size_t byte = 0; byte < 256; ++byte)
      tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 0xff];
  return tables;
}
constexpr auto shift_tables = make_tables();
static_assert(shift_tables[0][1] == 0xf26b8303u, "the table of RFC 3720");

u64 load8(const std::byte* from) {
  u64 value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) u32 crc32c_sse42(const std::byte* data, size_t bytes, u32 crc) noexcept {
  u64 state = ~crc;
  for (; bytes >= 8; data += 8, bytes -= 8) state = _mm_crc32_u64(state, load8(data));
  auto narrow = static_cast<u32>(state);
  for (; bytes; ++data, --bytes) narrow = _mm_crc32_u8(narrow, static_cast<u8>(*data));
  return ~narrow;
}

// Three pages side by side; page_bytes is a multiple of 8 (the caller checks).
__attribute__((target("sse4.2"))) void crc32c_three(const std::byte* pages, size_t page_bytes, u32* out) noexcept {
  u64 a = 0xffffffffu, b = a, c = a;
  const std::byte *pa = pages, *pb = pages + page_bytes, *pc = pages + 2 * page_bytes;
  for (size_t at = 0; at < page_bytes; at += 8) {
    a = _mm_crc32_u64(a, load8(pa + at));
    b = _mm_crc32_u64(b, load8(pb + at));
    c = _mm_crc32_u64(c, load8(pc + at));
  }
  out[0] = ~static_cast<u32>(a);
  out[1] = ~static_cast<u32>(b);
  out[2] = ~static_cast<u32>(c);
}

bool has_sse42() {
  static const bool has = __builtin_cpu_supports("sse4.2");
  return has;
}
#else
u32 crc32c_sse42(const std::byte* data, size_t bytes, u32 crc) noexcept { return crc32c_portable(data, bytes, crc); }
void crc32c_three(const std::byte*, size_t, u32*) noexcept {}
bool has_sse42() { return false; }
#endif

}  // namespace

u32 crc32c_portable(const std::byte* data, size_t bytes, u32 crc) noexcept {
  u32 state = ~crc;
  for (; bytes >= 8; data += 8, bytes -= 8) {
    const u64 word = load8(data) ^ state;
    state = 0;
    for (int k = 0; k < 8; ++k) state ^= shift_tables[7 - k][(word >> (8 * k)) & 0xff];
  }
  for (; bytes; ++data, --bytes) state = (state >> 8) ^ shift_tables[0][(state ^ static_cast<u8>(*data)) & 0xff];
  return ~state;
}

u32 crc32c(const std::byte* data, size_t bytes, u32 crc) noexcept {
  return has_sse42() ? crc32c_sse42(data, bytes, crc) : crc32c_portable(data, bytes, crc);
}

void crc32c_pages(const std::byte* pages, size_t count, size_t page_bytes, u32* out) noexcept {
  size_t page = 0;
  if (has_sse42() && page_bytes % 8 == 0)
    for (; page + 3 <= count; page += 3) crc32c_three(pages + page * page_bytes, page_bytes, out + page);
  for (; page < count; ++page) out[page] = crc32c(pages + page * page_bytes, page_bytes);
}

}  // namespace gids::store
