// Copies the rows of a minibatch out of lines and of its run, both in device memory, and rows of the run to lines.
// Launched by gids/packs/device_runs.py, on one stream, in this order: lines that are free from this step on are given
// to rows of the run. Grids may have any size; blocks are multiples of 32 threads.
#include "gids/row_copy.h"

using gids::u32;
using gids::u64;
using gids::u8;

namespace {
constexpr u32 in_run = 1u << 31;  // of a source: the rest is a row of the run, else it is a line
constexpr u32 no_line = ~0u;
}  // namespace

// out[i] = the row that sources[i] says, of lines or of the run, whose rows are `stride` bytes apart.
extern "C" __global__ __launch_bounds__(256, 4) void gids_gather_annex(const u8* lines, const u8* run,
                                                                       const u32* sources, u64 n, u64 stride, u8* out,
                                                                       u64 as, u64 row_items, u64 out_row_bytes,
                                                                       const float* scales, u64* overflowed) {
  gids::gather_rows(n, out, gids::RowCopy{as, row_items, out_row_bytes, scales, overflowed}, [&](u64 i) -> u64 {
    const u32 source = sources[i];
    return reinterpret_cast<u64>(source & in_run ? run : lines) + u64{source & ~in_run} * stride;
  });
}

// Row i of the run goes to line keeps[i], if that is one. as: copy_as(), of bytes as they are; row_items: of a stride.
extern "C" __global__ __launch_bounds__(256, 4) void gids_keep_rows(const u8* run, const u32* keeps, u64 n, u64 stride,
                                                                    u64 as, u64 row_items, u8* lines) {
  const gids::RowCopy copy{as, row_items, stride, nullptr, nullptr};
  for (u64 i = gids::warp_index(); i < n; i += gids::warp_count()) {
    const u32 line = keeps[i];
    if (line == no_line) continue;
    copy.with_item([&](auto item) {
      using Item = decltype(item);
      const auto* from = reinterpret_cast<const typename Item::Load*>(run + i * stride);
      auto* to = reinterpret_cast<typename Item::Store*>(lines + line * stride);
      bool overflowed = false;
      for (u64 k = gids::lane(); k < row_items; k += 32) to[k] = item.of(from[k], static_cast<u32>(k), 0, overflowed);
    });
  }
}
