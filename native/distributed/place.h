// Which devices hold which rows: Algorithm 1 of Song and Jiang, "Rethinking graph data placement for graph neural
// network training on multiple GPUs". Called by bind/ for gids.distributed.place. Knows numbers only.
#pragma once

#include <span>

#include "gids/target.h"

namespace gids::distributed {

constexpr size_t max_devices = 64;  // one bit each

// A new row is worth `first` times its heat to the devices; a copy that goes costs `copy` times the heat of its row.
struct Worth {
  double first, copy;
};

// All rows by falling heat, equals in their order. heat: none is negative or NaN; -0 counts as 0. rows: u32[n].
// A radix sort: linear in n; takes 2 x n x (sizeof(Heat) + 4) bytes meanwhile.
template <class Heat> void by_heat(const Heat* heat, size_t n, u32* rows);

// Sets bit d of holders[v] for every device d that holds row v, and clears the others. rows: from by_heat. capacities:
// rows of each device, at most 64 devices and as many bits in Mask. gained: what each device got by exchanging rows.
// Returns how many copies were exchanged for rows that no device held.
template <class Heat, class Mask>
u64 place(const u32* rows, const Heat* heat, size_t n, std::span<const u64> capacities, Worth worth, Mask* holders,
          std::span<double> gained);

}  // namespace gids::distributed
