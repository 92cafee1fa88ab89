#include "sampler/draws.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gids::sampler {

namespace {

static_assert(draw_lanes % 8 == 0 && draw_lanes <= 32, "whole vectors, and a bit for each lane");

inline __attribute__((always_inline)) void draw_pairs_here(const u64* node, u64 key, u32 i, DrawPairs& out) {
  for (u32 lane = 0; lane < draw_lanes; ++lane) {
    const random::Words pair = random::draw_pair(key, node[lane], i);
    out[0][lane] = random::low_half(pair);
    out[1][lane] = random::high_half(pair);
  }
}

#if defined(__x86_64__)

__attribute__((target("avx2"))) void draw_pairs_avx2(const u64* node, u64 key, u32 i, DrawPairs& out) {
  draw_pairs_here(node, key, i, out);
}

// Philox2x32-10 of eight counters. The multiplication looks at the lower half of a lane alone, so that upper halves
// may hold anything until the end.
__attribute__((target("avx512f"))) inline __m512i numbers_avx512(const u64* node, u64 key) {
  constexpr __mmask8 all = 0xFF;  // the forms without a mask have g++ 12 warn of its own headers
  const __m512i multiplier = _mm512_set1_epi64(random::philox2_multiplier);
  __m512i c0 = _mm512_loadu_si512(node);
  __m512i c1 = _mm512_set1_epi64(static_cast<i64>(key >> 32));
  u32 k = static_cast<u32>(key);
  for (u32 i = 0; i < random::rounds; ++i, k += random::key_step) {
    const __m512i product = _mm512_maskz_mul_epu32(all, c0, multiplier);
    const __m512i mixed = _mm512_xor_si512(c1, _mm512_set1_epi64(k));
    c0 = _mm512_xor_si512(_mm512_maskz_srli_epi64(all, product, 32), mixed);
    c1 = product;
  }
  return _mm512_or_si512(_mm512_and_si512(c0, _mm512_set1_epi64(0xFFFFFFFF)), _mm512_maskz_slli_epi64(all, c1, 32));
}

__attribute__((target("avx2"))) inline __m256i numbers_avx2(const u64* node, u64 key) {
  const __m256i multiplier = _mm256_set1_epi64x(random::philox2_multiplier);
  __m256i c0 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(node));
  __m256i c1 = _mm256_set1_epi64x(static_cast<i64>(key >> 32));
  u32 k = static_cast<u32>(key);
  for (u32 i = 0; i < random::rounds; ++i, k += random::key_step) {
    const __m256i product = _mm256_mul_epu32(c0, multiplier);
    const __m256i mixed = _mm256_xor_si256(c1, _mm256_set1_epi64x(k));
    c0 = _mm256_xor_si256(_mm256_srli_epi64(product, 32), mixed);
    c1 = product;
  }
  return _mm256_blend_epi32(c0, _mm256_slli_epi64(c1, 32), 0xAA);
}

__attribute__((target("avx512f"))) void node_numbers_avx512(const u64* node, u32 count, u64 key, u64* out) {
  for (u32 at = 0; at < count; at += 8) _mm512_storeu_si512(out + at, numbers_avx512(node + at, key));
}
__attribute__((target("avx2"))) void node_numbers_avx2(const u64* node, u32 count, u64 key, u64* out) {
  for (u32 at = 0; at < count; at += 4)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + at), numbers_avx2(node + at, key));
}

__attribute__((target("avx512f"))) u32 numbers_below_avx512(const u64* node, u32 count, u64 key, u64 limit) {
  const __m512i limits = _mm512_set1_epi64(static_cast<i64>(limit));
  u32 below = 0;
  for (u32 at = 0; at < count; at += 8)
    below |= u32{_mm512_cmplt_epu64_mask(numbers_avx512(node + at, key), limits)} << at;
  return below;
}
__attribute__((target("avx2"))) u32 numbers_below_avx2(const u64* node, u32 count, u64 key, u64 limit) {
  const __m256i sign = _mm256_set1_epi64x(static_cast<i64>(u64{1} << 63));  // signed comparison is all there is
  const __m256i limits = _mm256_xor_si256(_mm256_set1_epi64x(static_cast<i64>(limit)), sign);
  u32 below = 0;
  for (u32 at = 0; at < count; at += 4) {
    const __m256i less = _mm256_cmpgt_epi64(limits, _mm256_xor_si256(numbers_avx2(node + at, key), sign));
    below |= static_cast<u32>(_mm256_movemask_pd(_mm256_castsi256_pd(less))) << at;
  }
  return below;
}

const bool has_avx2 = __builtin_cpu_supports("avx2");
const bool has_avx512 = __builtin_cpu_supports("avx512f");

#endif

u32 first_lanes(u32 count) { return count < draw_lanes ? (1u << count) - 1 : ~0u; }

}  // namespace

void draw_pairs(const Lanes& node, u64 key, u32 i, DrawPairs& out) {
#if defined(__x86_64__)
  if (has_avx2) return draw_pairs_avx2(node, key, i, out);
#endif
  draw_pairs_here(node, key, i, out);
}

void node_numbers(const Lanes& node, u32 count, u64 key, Lanes& out) {
#if defined(__x86_64__)
  if (has_avx512) return node_numbers_avx512(node, count, key, out);
  if (has_avx2) return node_numbers_avx2(node, count, key, out);
#endif
  for (u32 lane = 0; lane < count; ++lane) out[lane] = random::node_number(key, node[lane]);
}

u32 numbers_below(const Lanes& node, u32 count, u64 key, u64 limit) {
#if defined(__x86_64__)
  if (has_avx512) return numbers_below_avx512(node, count, key, limit) & first_lanes(count);
  if (has_avx2) return numbers_below_avx2(node, count, key, limit) & first_lanes(count);
#endif
  u32 below = 0;
  for (u32 lane = 0; lane < count; ++lane) below |= u32{random::node_number(key, node[lane]) < limit} << lane;
  return below;
}

}  // namespace gids::sampler
