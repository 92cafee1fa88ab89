// Copies the rows of a minibatch out of packs in device memory, converting them if needed: every row is among the
// resident rows or in the pack. Launched by gids/packs/device_rows.py, after the packs and their row sets are there.
// Grids may have any size; blocks are multiples of 32 threads.
#include "gids/row_copy.h"
#include "gids/row_rank.h"

using gids::RankedRows;
using gids::u32;
using gids::u64;
using gids::u8;

// rows[0, n): of a table of row_count rows. resident, pack: the first row in memory of each set. fault: a word of host
// memory, where a row that is in neither set leaves its number + 1; its bytes of the output do not change.
extern "C" __global__ __launch_bounds__(256, 4) void gids_gather_packed(
    const u64* resident_words, const u32* resident_ranks, const u8* resident, const u64* pack_words,
    const u32* pack_ranks, const u8* pack, const u32* rows, u64 n, u64 row_count, u64 row_bytes, u8* out, u64 as,
    u64 row_items, u64 out_row_bytes, const float* scales, u64* overflowed, u64* fault) {
  const RankedRows kept{resident_words, resident_ranks}, packed{pack_words, pack_ranks};
  gids::gather_rows(n, out, gids::RowCopy{as, row_items, out_row_bytes, scales, overflowed}, [&](u64 i) -> u64 {
    const u64 row = rows[i];
    if (row < row_count) {
      if (packed.contains(row)) return reinterpret_cast<u64>(pack) + packed.rank(row) * row_bytes;
      if (kept.contains(row)) return reinterpret_cast<u64>(resident) + kept.rank(row) * row_bytes;
    }
    gids::system_ref<u64>(*fault).store(row + 1, gids::memory_order_relaxed);
    return 0;
  });
}
