// Copying rows that lie scattered into consecutive rows of an output, by one warp, converting their values on
// the way if asked to. Called by the gathering and filling kernels. Knows addresses only.
//
// A warp's rows are one sequence of items, 16 bytes each where alignment allows. The lanes take the items in
// turn, whatever the length of a row: a long row takes the whole warp, and short ones share it.
#pragma once

#include "gids/convert.h"
#include "gids/target.h"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define GIDS_UNROLL _Pragma("unroll")
#else
#define GIDS_UNROLL
#endif

namespace gids {

struct alignas(16) Bytes16 {
  u64 low, high;
};

// What a lane loads and stores at once: bytes as they are …
template <class Word>
struct Same {
  using Load = Word;
  using Store = Word;
  GIDS_HD static Store of(const Load& v) { return v; }
};

// … or `Count` values of one type that become another.
template <class From, class To, u32 Count>
struct Converted {
  struct alignas(Count * sizeof(From)) Load {
    From values[Count];
  };
  struct alignas(Count * sizeof(To)) Store {
    To values[Count];
  };
  GIDS_HD static Store of(const Load& from) {
    Store to;
    for (u32 i = 0; i < Count; ++i) convert(from.values[i], to.values[i]);
    return to;
  }
};

// How rows are copied, as one number that the host composes: bits 0..7 bytes (plain) or values (converted) to an
// item, bits 8..15 the type converted from, bits 16..23 the type converted to; types 0 mean as they are.
namespace copy_as {

enum Type : u64 { unchanged = 0, float32 = 1, float16 = 2, bfloat16 = 3 };

template <class From, class To, class F>
GIDS_HD void with_count(u64 count, F&& f) {
  if (count == 4) f(Converted<From, To, 4>{});
  else f(Converted<From, To, 1>{});
}

// Calls f with the item that `as` stands for.
template <class F>
GIDS_HD void with_item(u64 as, F&& f) {
  const u64 count = as & 255;
  switch (as >> 8) {
    case unchanged:
      switch (count) {
        case 16: return f(Same<Bytes16>{});
        case 8: return f(Same<u64>{});
        case 4: return f(Same<u32>{});
        case 2: return f(Same<u16>{});
        default: return f(Same<u8>{});
      }
    case float32 | float16 << 8: return with_count<Float32, Float16>(count, f);
    case float32 | bfloat16 << 8: return with_count<Float32, BFloat16>(count, f);
    case float16 | float32 << 8: return with_count<Float16, Float32>(count, f);
    case float16 | bfloat16 << 8: return with_count<Float16, BFloat16>(count, f);
    case bfloat16 | float32 << 8: return with_count<BFloat16, Float32>(count, f);
    default: return with_count<BFloat16, Float16>(count, f);
  }
}

}  // namespace copy_as

#if GIDS_SIMT

// Copies `rows` (at most 32) rows of row_items items to consecutive rows from `to`. `from`: lane r's is the
// address of row r, or 0 to leave that row of the output alone. All lanes of the warp call.
// Loads are plain: pages in host memory may be written again later, so they are not read-only to any cache.
template <class Item>
__device__ void copy_rows(u64 from, u8* to, u32 rows, u32 row_items, u32 lane) {
  constexpr u32 in_flight = 4;  // independent loads before the first store
  const u32 row_step = 32 / row_items, item_step = 32 % row_items;
  const u32 items = rows * row_items;  // a row has at most 2^26 bytes
  auto* out = reinterpret_cast<typename Item::Store*>(to);
  u32 row = lane / row_items, item = lane % row_items;
  for (u32 first = lane; first - lane < items; first += 32 * in_flight) {
    typename Item::Load values[in_flight] = {};
    bool wanted[in_flight];
    GIDS_UNROLL
    for (u32 k = 0; k < in_flight; ++k) {
      const u64 address = __shfl_sync(~0u, from, static_cast<int>(row & 31));
      wanted[k] = row < rows && address != 0;
      if (wanted[k]) values[k] = reinterpret_cast<const typename Item::Load*>(address)[item];
      row += row_step;
      item += item_step;
      if (item >= row_items) {
        item -= row_items;
        ++row;
      }
    }
    GIDS_UNROLL
    for (u32 k = 0; k < in_flight; ++k)
      if (wanted[k]) out[first + 32 * k] = Item::of(values[k]);
  }
}

#endif  // GIDS_SIMT

}  // namespace gids
