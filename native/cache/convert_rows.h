// How rows are handed out: as they are, as other floating types, or widened from int8 by a scale. Called by
// PageCache; knows addresses only. What a kernel does of it on a device is in gids/row_copy.h: the same bits.
#pragma once

#include <cstddef>
#include <span>
#include <stdexcept>

#include "gids/convert.h"

namespace gids::cache {

struct RowForm {
  ValueType from = unchanged;  // unchanged: bytes, and the rest but row_bytes says nothing
  ValueType to = unchanged;
  u32 row_bytes = 0;                   // in a page
  u32 values = 0;                      // of a row
  std::span<const float> scales = {};  // of int8_by_column, one for each value

  bool as_stored() const { return from == unchanged; }
  u64 out_row_bytes() const { return as_stored() ? row_bytes : u64{values} * (to == float32 ? 4 : 2); }

  void validate() const {
    if (as_stored()) return;
    const u64 stored = from == float32          ? u64{values} * 4
                       : from == int8_by_row    ? scale_offset(values) + 4
                       : from == int8_by_column ? u64{values}
                                                : u64{values} * 2;
    if (from > int8_by_column || to == unchanged || to > bfloat16 || from == to || stored != row_bytes ||
        scales.size() != (from == int8_by_column ? values : 0))
      throw std::invalid_argument("rows do not have the bytes that their values take");
  }
};

// Writes the rows at from[i] to to[i] in that form. streaming: as for copy_rows. Returns whether a finite value became
// infinite.
bool convert_rows(const RowForm& form, const std::byte* const* from, std::byte* const* to, size_t rows, bool streaming);

}  // namespace gids::cache
