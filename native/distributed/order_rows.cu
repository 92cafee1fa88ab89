// Puts rows that ranks sent each other in the order of a minibatch, and converts them if needed. Launched by
// gids/distributed/rows.py. Grids may have any size; blocks are multiples of 32 threads.
#include "gids/row_copy.h"

using gids::u64;
using gids::u8;

// stored: as they came, row_bytes each. places[0, n): where each row of the output is among them.
extern "C" __global__ __launch_bounds__(256, 4) void gids_order_rows(const u8* stored, u64 row_bytes, const int* places,
                                                                     u64 n, u8* out, u64 as, u64 row_items,
                                                                     u64 out_row_bytes, const float* scales,
                                                                     u64* overflowed) {
  gids::gather_rows(n, out, gids::RowCopy{as, row_items, out_row_bytes, scales, overflowed}, [&](u64 i) -> u64 {
    return reinterpret_cast<u64>(stored) + static_cast<u64>(places[i]) * row_bytes;
  });
}
