#include "cache/convert_rows.h"

#include <cstdint>
#include <cstring>

#include "cache/copy.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define GIDS_AVX2 __attribute__((target("avx2,f16c")))
#endif

namespace gids::cache {

namespace {

template <ValueType type> struct Value;
template <> struct Value<float32> {
  using Type = Float32;
};
template <> struct Value<float16> {
  using Type = Float16;
};
template <> struct Value<bfloat16> {
  using Type = BFloat16;
};
template <> struct Value<int8_by_row> {
  using Type = Int8;
};
template <> struct Value<int8_by_column> {
  using Type = Int8;
};

template <class T>
T load(const std::byte* p) {  // rows have any alignment
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// Values [first, values) of one row. Like all of these, returns whether a finite value became infinite.
template <ValueType From, ValueType To>
bool convert_row(const RowForm& form, const std::byte* row, std::byte* out, size_t first) {
  using Stored = typename Value<From>::Type;
  using Wanted = typename Value<To>::Type;
  Float32 scale{};
  if constexpr (From == int8_by_row) scale = load<Float32>(row + scale_offset(form.values));
  bool overflowed = false;
  for (size_t i = first; i < form.values; ++i) {
    const Stored stored = load<Stored>(row + i * sizeof(Stored));
    Wanted wanted;
    if constexpr (From == int8_by_row) {
      overflowed |= widen(stored, scale, wanted);
    } else if constexpr (From == int8_by_column) {
      overflowed |= widen(stored, Float32{__builtin_bit_cast(u32, form.scales[i])}, wanted);
    } else {
      overflowed |= overflows(stored, wanted);
    }
    std::memcpy(out + i * sizeof(Wanted), &wanted, sizeof wanted);
  }
  return overflowed;
}

#if defined(__x86_64__)
const bool has_vectors = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");

template <ValueType From>
GIDS_AVX2 inline __m256 load8(const RowForm& form, const std::byte* row, size_t i, __m256 scale) {
  if constexpr (From == float32) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(row) + i);
  } else if constexpr (From == float16) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * i)));
  } else if constexpr (From == bfloat16) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 2 * i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  } else {
    const __m128i steps = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + i));
    const __m256 scales = From == int8_by_column ? _mm256_loadu_ps(form.scales.data() + i) : scale;
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(steps)), scales);
  }
}

template <bool streaming>
GIDS_AVX2 inline void store16(std::byte* to, __m128i bits) {
  if constexpr (streaming) _mm_stream_si128(reinterpret_cast<__m128i*>(to), bits);
  else _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bits);
}

template <ValueType To, bool streaming>
GIDS_AVX2 inline void store8(std::byte* out, size_t i, __m256 values) {
  if constexpr (To == float32) {
    auto* to = reinterpret_cast<float*>(out) + i;
    if constexpr (streaming) _mm256_stream_ps(to, values);
    else _mm256_storeu_ps(to, values);
  } else if constexpr (To == float16) {
    store16<streaming>(out + 2 * i, _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  } else {
    const __m256i bits = _mm256_castps_si256(values), high = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
    const __m256i halves = _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), quiet, nan);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0b1000);
    store16<streaming>(out + 2 * i, _mm256_castsi256_si128(packed));
  }
}

template <ValueType From, ValueType To, bool streaming>
GIDS_AVX2 bool convert_row_by_eight(const RowForm& form, const std::byte* row, std::byte* out) {
  __m256 scale = _mm256_setzero_ps();
  if constexpr (From == int8_by_row) scale = _mm256_set1_ps(load<float>(row + scale_offset(form.values)));
  const size_t whole = form.values / 8 * 8;
  // From this magnitude on, a finite value becomes infinite. As signed integers, magnitudes + above are negative from
  // infinity on, so that the largest is of a finite value.
  constexpr u32 limit = To == float16 ? 0x477FF000 : 0x7F7F8000, above = 0x80000000u - 0x7F800000u;
  __m256i largest = _mm256_setzero_si256();
  for (size_t i = 0; i < whole; i += 8) {
    const __m256 values = load8<From>(form, row, i, scale);
    store8<To, streaming>(out, i, values);
    if constexpr (To != float32) {
      const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(values), _mm256_set1_epi32(0x7FFFFFFF));
      largest = _mm256_max_epi32(largest, _mm256_add_epi32(magnitude, _mm256_set1_epi32(above)));
    }
  }
  const __m256i over = _mm256_cmpgt_epi32(largest, _mm256_set1_epi32(static_cast<int>(limit + above - 1)));
  const bool overflowed = !_mm256_testz_si256(over, over);
  return (whole < form.values && convert_row<From, To>(form, row, out, whole)) || overflowed;
}
#endif

template <class Convert>
bool convert_each(const RowForm& form, const std::byte* const* from, std::byte* const* to, size_t rows,
                  Convert convert) {
  for (size_t i = 0; i < std::min(rows, rows_ahead); ++i) prefetch_row(from[i], form.row_bytes);
  bool overflowed = false;
  for (size_t i = 0; i < rows; ++i) {
    if (i + rows_ahead < rows) prefetch_row(from[i + rows_ahead], form.row_bytes);
    overflowed |= convert(from[i], to[i]);
  }
  return overflowed;
}

template <ValueType From, ValueType To>
bool convert_as(const RowForm& form, const std::byte* const* from, std::byte* const* to, size_t rows, bool streaming) {
#if defined(__x86_64__)
  if (has_vectors) {
    if (streaming && rows && form.out_row_bytes() % 32 == 0 && reinterpret_cast<uintptr_t>(to[0]) % 32 == 0) {
      const bool overflowed = convert_each(
          form, from, to, rows, [&](auto* f, auto* t) { return convert_row_by_eight<From, To, true>(form, f, t); });
      _mm_sfence();  // streamed stores are not ordered with the release that hands the rows over
      return overflowed;
    }
    return convert_each(form, from, to, rows,
                        [&](auto* f, auto* t) { return convert_row_by_eight<From, To, false>(form, f, t); });
  }
#endif
  (void)streaming;
  return convert_each(form, from, to, rows, [&](auto* f, auto* t) { return convert_row<From, To>(form, f, t, 0); });
}

}  // namespace

bool convert_rows(const RowForm& form, const std::byte* const* from, std::byte* const* to, size_t rows,
                  bool streaming) {
  switch (form.from | form.to << 8) {
    case float32 | float16 << 8: return convert_as<float32, float16>(form, from, to, rows, streaming);
    case float32 | bfloat16 << 8: return convert_as<float32, bfloat16>(form, from, to, rows, streaming);
    case float16 | float32 << 8: return convert_as<float16, float32>(form, from, to, rows, streaming);
    case float16 | bfloat16 << 8: return convert_as<float16, bfloat16>(form, from, to, rows, streaming);
    case bfloat16 | float32 << 8: return convert_as<bfloat16, float32>(form, from, to, rows, streaming);
    case bfloat16 | float16 << 8: return convert_as<bfloat16, float16>(form, from, to, rows, streaming);
    case int8_by_row | float32 << 8: return convert_as<int8_by_row, float32>(form, from, to, rows, streaming);
    case int8_by_row | float16 << 8: return convert_as<int8_by_row, float16>(form, from, to, rows, streaming);
    case int8_by_row | bfloat16 << 8: return convert_as<int8_by_row, bfloat16>(form, from, to, rows, streaming);
    case int8_by_column | float32 << 8: return convert_as<int8_by_column, float32>(form, from, to, rows, streaming);
    case int8_by_column | float16 << 8: return convert_as<int8_by_column, float16>(form, from, to, rows, streaming);
    case int8_by_column | bfloat16 << 8: return convert_as<int8_by_column, bfloat16>(form, from, to, rows, streaming);
    default: return copy_rows(from, to, rows, form.row_bytes, streaming), false;
  }
}

}  // namespace gids::cache
