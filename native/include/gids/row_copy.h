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

// What a lane loads and stores at once; `overflowed` becomes true if a finite value became infinite. Bytes as they
// are …
template <class Word>
struct Same {
  using Load = Word;
  using Store = Word;
  static constexpr bool scaled_by_row = false;
  GIDS_HD Store of(const Load& v, u32, u32, bool&) const { return v; }
};

// … or `Count` values of one type that become another …
template <class From, class To, u32 Count>
struct Converted {
  struct alignas(Count * sizeof(From)) Load {
    From values[Count];
  };
  struct alignas(Count * sizeof(To)) Store {
    To values[Count];
  };
  static constexpr bool scaled_by_row = false;
  GIDS_HD Store of(const Load& from, u32, u32, bool& overflowed) const {
    Store to;
    for (u32 i = 0; i < Count; ++i) overflowed |= overflows(from.values[i], to.values[i]);
    return to;
  }
};

// … or `Count` steps that become values, by the scale of their row …
template <class To, u32 Count>
struct ScaledByRow {
  using Load = typename Converted<Int8, To, Count>::Load;
  using Store = typename Converted<Int8, To, Count>::Store;
  static constexpr bool scaled_by_row = true;
  u64 scale_at;  // byte of a row

  GIDS_HD u32 scale_of(u64 row) const { return *reinterpret_cast<const u32*>(row + scale_at); }
  GIDS_HD Store of(const Load& from, u32, u32 scale, bool& overflowed) const {
    Store to;
    for (u32 i = 0; i < Count; ++i) overflowed |= widen(from.values[i], Float32{scale}, to.values[i]);
    return to;
  }
};

// … or by the scales of their columns.
template <class To, u32 Count>
struct ScaledByColumn {
  using Load = typename Converted<Int8, To, Count>::Load;
  using Store = typename Converted<Int8, To, Count>::Store;
  using Scales = typename Converted<Float32, To, Count>::Load;
  static constexpr bool scaled_by_row = false;
  const Scales* scales;  // one for each item of a row

  GIDS_HD Store of(const Load& from, u32 item, u32, bool& overflowed) const {
    const Scales scale = scales[item];
    Store to;
    for (u32 i = 0; i < Count; ++i) overflowed |= widen(from.values[i], scale.values[i], to.values[i]);
    return to;
  }
};

// How rows are copied, as one number: bits 0..7 the bytes (unchanged) or values (otherwise) of an item, bits 8..15
// the ValueType converted from, bits 16..23 the one converted to.
GIDS_HD constexpr u64 copy_as(u64 count, u64 from, u64 to) { return count | from << 8 | to << 16; }

// as: copy_as(), from the host.
struct RowCopy {
  u64 as;
  u64 row_items;
  u64 out_row_bytes;
  const float* scales;  // of int8_by_column: one for each value of a row, aligned to 16 bytes
  u64* overflowed;      // becomes 1 if a finite value became infinite

  // Calls f with the item that `as` stands for.
  template <class F>
  GIDS_HD void with_item(F&& f) const {
    switch (as >> 8) {
      case unchanged:
        switch (count()) {
          case 16: return f(Same<Bytes16>{});
          case 8: return f(Same<u64>{});
          case 4: return f(Same<u32>{});
          case 2: return f(Same<u16>{});
          default: return f(Same<u8>{});
        }
      case float32 | float16 << 8: return converted<Float32, Float16>(f);
      case float32 | bfloat16 << 8: return converted<Float32, BFloat16>(f);
      case float16 | float32 << 8: return converted<Float16, Float32>(f);
      case float16 | bfloat16 << 8: return converted<Float16, BFloat16>(f);
      case bfloat16 | float32 << 8: return converted<BFloat16, Float32>(f);
      case bfloat16 | float16 << 8: return converted<BFloat16, Float16>(f);
      case int8_by_row | float32 << 8: return scaled_by_row<Float32>(f);
      case int8_by_row | float16 << 8: return scaled_by_row<Float16>(f);
      case int8_by_row | bfloat16 << 8: return scaled_by_row<BFloat16>(f);
      case int8_by_column | float32 << 8: return scaled_by_column<Float32>(f);
      case int8_by_column | float16 << 8: return scaled_by_column<Float16>(f);
      default: return scaled_by_column<BFloat16>(f);
    }
  }

 private:
  GIDS_HD u64 count() const { return as & 255; }

  template <class From, class To, class F>
  GIDS_HD void converted(F&& f) const {
    if (count() == 4) f(Converted<From, To, 4>{});
    else f(Converted<From, To, 1>{});
  }
  template <class To, class F>
  GIDS_HD void scaled_by_row(F&& f) const {
    const u64 scale_at = scale_offset(row_items * count());
    if (count() == 4) f(ScaledByRow<To, 4>{scale_at});
    else f(ScaledByRow<To, 1>{scale_at});
  }
  template <class To, class F>
  GIDS_HD void scaled_by_column(F&& f) const {
    if (count() == 4) f(ScaledByColumn<To, 4>{reinterpret_cast<const typename ScaledByColumn<To, 4>::Scales*>(scales)});
    else f(ScaledByColumn<To, 1>{reinterpret_cast<const typename ScaledByColumn<To, 1>::Scales*>(scales)});
  }
};

#if GIDS_SIMT

// What lanes load that have no row: a load under a condition is waited for before the next one is issued.
alignas(16) __device__ const u64 nothing[2] = {0, 0};

// Copies `rows` (at most 32) rows of row_items items to consecutive rows from `to`. `from`: lane r's is the
// address of row r, or 0 to leave that row of the output alone. All lanes of the warp call. Returns whether a finite
// value of this lane became infinite.
// Loads are plain: pages in host memory may be written again later, so they are not read-only to any cache.
template <class Item>
__device__ bool copy_rows(const Item& as, u64 from, u8* to, u32 rows, u32 row_items, u32 lane) {
  static_assert(sizeof(typename Item::Load) <= sizeof(nothing));
  constexpr u32 in_flight = 4;  // independent loads before the first store
  u32 scale = 0;
  if constexpr (Item::scaled_by_row) scale = from ? as.scale_of(from) : 0;
  const u32 row_step = 32 / row_items, item_step = 32 % row_items;
  const u32 items = rows * row_items;  // a row has at most 2^26 bytes
  auto* out = reinterpret_cast<typename Item::Store*>(to);
  u32 row = lane / row_items, item = lane % row_items;
  bool overflowed = false;
  for (u32 first = lane; first - lane < items; first += 32 * in_flight) {
    typename Item::Load values[in_flight];
    u64 at[in_flight];
    u32 items_of[in_flight], scales[in_flight] = {};
    GIDS_UNROLL
    for (u32 k = 0; k < in_flight; ++k) {
      const u64 address = __shfl_sync(~0u, from, static_cast<int>(row & 31));
      if constexpr (Item::scaled_by_row) scales[k] = __shfl_sync(~0u, scale, static_cast<int>(row & 31));
      items_of[k] = item;
      at[k] = row < rows && address != 0 ? address + u64{item} * sizeof(typename Item::Load) : 0;
      row += row_step;
      item += item_step;
      if (item >= row_items) {
        item -= row_items;
        ++row;
      }
    }
    GIDS_UNROLL
    for (u32 k = 0; k < in_flight; ++k)
      values[k] = *reinterpret_cast<const typename Item::Load*>(at[k] ? at[k] : reinterpret_cast<u64>(nothing));
    GIDS_UNROLL
    for (u32 k = 0; k < in_flight; ++k)
      if (at[k]) out[first + 32 * k] = as.of(values[k], items_of[k], scales[k], overflowed);
  }
  return overflowed;
}

__device__ inline u64 warp_index() { return (u64{blockIdx.x} * blockDim.x + threadIdx.x) / 32; }
__device__ inline u64 warp_count() { return u64{gridDim.x} * blockDim.x / 32; }
__device__ inline u32 lane() { return threadIdx.x % 32; }

// Copies rows to out[0, n): source(i) is the address of row i, or 0 to skip it. Each warp takes so many rows at once
// that the minibatch is spread evenly over all warps, up to one per lane.
template <class Source>
__device__ void gather_rows(u64 n, u8* out, const RowCopy& copy, Source&& source) {
  const u64 turns = div_ceil(n, 32 * warp_count());
  const u64 batch = turns ? div_ceil(n, turns * warp_count()) : 1;
  for (u64 first = warp_index() * batch; first < n; first += warp_count() * batch) {
    const u32 rows = static_cast<u32>(n - first < batch ? n - first : batch);
    const u64 from = lane() < rows ? source(first + lane()) : 0;
    copy.with_item([&](auto item) {
      if (copy_rows(item, from, out + first * copy.out_row_bytes, rows, static_cast<u32>(copy.row_items), lane()))
        system_ref<u64>(*copy.overflowed).store(1, memory_order_relaxed);
    });
  }
}

// Copies one row. All lanes of the warp call with the same arguments.
__device__ inline void copy_row(u64 from, u8* to, const RowCopy& copy) {
  copy.with_item([&](auto item) {
    if (copy_rows(item, from, to, 1, static_cast<u32>(copy.row_items), lane()))
      system_ref<u64>(*copy.overflowed).store(1, memory_order_relaxed);
  });
}

#endif  // GIDS_SIMT

}  // namespace gids
