// Conversions between float32, float16 and bfloat16 in integer operations, so that every device gives the same
// bits: rounded to nearest, ties to even; what is too large becomes infinite; NaN stays NaN, with its sign and
// the top of its payload. And int8 times a scale, one product of float32. Called by the copying of rows, which
// gives the types and the layouts of rows their numbers here.
#pragma once

#include "gids/target.h"

namespace gids {

// Values by their bits: the type says how to read them.
struct Float32 {
  u32 bits;
};
struct Float16 {
  u16 bits;
};
struct BFloat16 {
  u16 bits;
};
// A whole number, -127 to 127, of steps of a scale.
struct Int8 {
  signed char steps;
};
static_assert(sizeof(Float32) == 4 && sizeof(Float16) == 2 && sizeof(BFloat16) == 2 && sizeof(Int8) == 1);

// What the values of a row are on disk, and (the first four) in the output.
enum ValueType : u64 { unchanged = 0, float32 = 1, float16 = 2, bfloat16 = 3, int8_by_row = 4, int8_by_column = 5 };

// A row of int8_by_row ends with its scale, a Float32 at this byte of it; zeros fill what is between.
GIDS_HD constexpr u64 scale_offset(u64 values) { return (values + 3) / 4 * 4; }

namespace detail {

// v / 2^by, to nearest, ties to even; by in 1..31.
GIDS_HD constexpr u32 shift_to_nearest(u32 v, u32 by) { return (v + (1u << (by - 1)) - 1 + ((v >> by) & 1)) >> by; }

GIDS_HD constexpr u32 leading_zeros(u32 v) {
#if defined(__CUDA_ARCH__)
  return static_cast<u32>(__clz(static_cast<int>(v)));
#else
  return static_cast<u32>(__builtin_clz(v));
#endif
}

GIDS_HD float as_float(u32 bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

GIDS_HD u32 as_bits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  return __builtin_bit_cast(u32, value);
#endif
}

}  // namespace detail

GIDS_HD constexpr void convert(Float32 from, Float32& to) { to = from; }

GIDS_HD constexpr void convert(BFloat16 from, Float32& to) { to.bits = u32{from.bits} << 16; }

GIDS_HD constexpr void convert(Float16 from, Float32& to) {
  const u32 sign = u32{from.bits & 0x8000u} << 16, magnitude = from.bits & 0x7FFFu;
  if (magnitude >= 0x7C00) {                               // infinite or NaN
    const u32 quiet = magnitude > 0x7C00 ? 0x400000u : 0;  // as processors make it
    to.bits = sign | 0x7F800000u | quiet | (magnitude & 0x3FF) << 13;
  } else if (magnitude >= 0x0400) {
    to.bits = sign | ((magnitude << 13) + (u32{127 - 15} << 23));
  } else if (magnitude) {  // subnormal: its highest bit becomes the implicit one
    const u32 shift = detail::leading_zeros(magnitude) - 21;
    to.bits = sign | (((magnitude << (13 + shift)) & 0x7FFFFFu) + ((127 - 14 - shift) << 23));
  } else {
    to.bits = sign;
  }
}

GIDS_HD constexpr void convert(Float32 from, BFloat16& to) {
  const bool nan = (from.bits & 0x7FFFFFFFu) > 0x7F800000u;
  to.bits = static_cast<u16>(nan ? from.bits >> 16 | 0x40 : (from.bits + 0x7FFF + (from.bits >> 16 & 1)) >> 16);
}

GIDS_HD constexpr void convert(Float32 from, Float16& to) {
  const u32 sign = from.bits >> 16 & 0x8000u, magnitude = from.bits & 0x7FFFFFFFu;
  u32 half;
  if (magnitude > 0x7F800000u) {
    half = 0x7E00u | (magnitude >> 13 & 0x3FF);
  } else if (magnitude >= 0x477FF000u) {  // 65520, halfway from the largest to what would come next
    half = 0x7C00u;
  } else if (magnitude >= 0x38800000u) {  // 2^-14, the smallest normal one; a carry goes into the exponent
    half = detail::shift_to_nearest(magnitude - (u32{127 - 15} << 23), 13);
  } else if (magnitude > 0x33000000u) {  // above 2^-25, half of the smallest subnormal one
    half = detail::shift_to_nearest((magnitude & 0x7FFFFFu) | 0x800000u, 126 - (magnitude >> 23));
  } else {
    half = 0;
  }
  to.bits = static_cast<u16>(sign | half);
}

GIDS_HD constexpr void convert(Float16 from, BFloat16& to) {
  Float32 wide{};
  convert(from, wide);
  convert(wide, to);
}

GIDS_HD constexpr void convert(BFloat16 from, Float16& to) {
  Float32 wide{};
  convert(from, wide);
  convert(wide, to);
}

GIDS_HD constexpr bool is_infinite(Float32 value) { return (value.bits & 0x7FFFFFFFu) == 0x7F800000u; }
GIDS_HD constexpr bool is_infinite(Float16 value) { return (value.bits & 0x7FFFu) == 0x7C00u; }
GIDS_HD constexpr bool is_infinite(BFloat16 value) { return (value.bits & 0x7FFFu) == 0x7F80u; }

// As convert(). Returns whether a finite value became infinite.
template <class From, class To>
GIDS_HD constexpr bool overflows(From from, To& to) {
  convert(from, to);
  return is_infinite(to) && !is_infinite(from);
}

// steps * scale, rounded to float32 and then to `To`. No sum is near, so nothing is contracted. Returns as overflows().
template <class To>
GIDS_HD bool widen(Int8 from, Float32 scale, To& to) {
  return overflows(Float32{detail::as_bits(static_cast<float>(from.steps) * detail::as_float(scale.bits))}, to);
}

}  // namespace gids
