// Copies the rows of a minibatch out of packs in memory. Called by bind/; knows row sets and addresses.
#pragma once

#include <cstddef>
#include <span>
#include <tuple>

#include "cache/convert_rows.h"
#include "cache/workers.h"
#include "packs/row_set.h"

namespace gids::packs {

// Rows in memory, in ascending order.
struct Holder {
  const RowSet* rows;
  const std::byte* memory;
};

// Writes row ids[i], from the first holder that has it, to out + i * form.out_row_bytes(). Returns how many rows no
// holder has, whose bytes are arbitrary, and whether a finite value became infinite.
std::tuple<u64, bool> gather(cache::Workers& workers, std::span<const u32> ids, std::span<const Holder> holders,
                             const cache::RowForm& form, std::byte* out);

}  // namespace gids::packs
