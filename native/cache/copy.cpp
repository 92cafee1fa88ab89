#include "cache/copy.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gids::cache {

namespace {

template <class Copy>
void copy_each(const std::byte* const* from, std::byte* const* to, size_t rows, size_t row_bytes, Copy copy) {
  for (size_t i = 0; i < std::min(rows, rows_ahead); ++i) prefetch_row(from[i], row_bytes);
  for (size_t i = 0; i < rows; ++i) {
    if (i + rows_ahead < rows) prefetch_row(from[i + rows_ahead], row_bytes);
    copy(to[i], from[i], row_bytes);
  }
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void stream(std::byte* to, const std::byte* from, size_t bytes) {
  for (size_t b = 0; b < bytes; b += 128) {
    const auto* f = reinterpret_cast<const __m256i*>(from + b);
    auto* t = reinterpret_cast<__m256i*>(to + b);
    const __m256i r0 = _mm256_loadu_si256(f), r1 = _mm256_loadu_si256(f + 1), r2 = _mm256_loadu_si256(f + 2),
                  r3 = _mm256_loadu_si256(f + 3);
    _mm256_stream_si256(t, r0);
    _mm256_stream_si256(t + 1, r1);
    _mm256_stream_si256(t + 2, r2);
    _mm256_stream_si256(t + 3, r3);
  }
}

const bool can_stream = __builtin_cpu_supports("avx2");
#endif

}  // namespace

void copy_rows(const std::byte* const* from, std::byte* const* to, size_t rows, size_t row_bytes, bool streaming) {
#if defined(__x86_64__)
  if (streaming && can_stream && rows && row_bytes % 128 == 0 && reinterpret_cast<uintptr_t>(to[0]) % 32 == 0) {
    copy_each(from, to, rows, row_bytes, [](std::byte* t, const std::byte* f, size_t n) { stream(t, f, n); });
    _mm_sfence();  // streamed stores are not ordered with the release that hands the rows over
    return;
  }
#endif
  (void)streaming;
  copy_each(from, to, rows, row_bytes, [](std::byte* t, const std::byte* f, size_t n) { std::memcpy(t, f, n); });
}

}  // namespace gids::cache
