// The layout of a table's rows in pages and of its pages in shards. Shared by the cache's parts; knows no files.
#pragma once

#include <stdexcept>

#include "gids/target.h"

namespace gids::cache {

struct Geometry {
  u64 row_count;
  u32 row_bytes;
  u32 page_bytes;
  u32 rows_per_page;  // a row longer than a page would have one long page to itself
  u32 shard_count;
  u32 first_file;  // the engine's number of shard 0; the others follow

  void validate() const {
    if (!row_bytes || !page_bytes || !rows_per_page || !shard_count || u64{row_bytes} * rows_per_page > page_bytes)
      throw std::invalid_argument("a page does not hold its rows");
  }
  u64 page_count() const { return div_ceil(row_count, rows_per_page); }
  u64 page_of(i64 row) const {
    return rows_per_page == 1 ? static_cast<u64>(row) : static_cast<u64>(row) / rows_per_page;
  }
  u32 offset_in_page(i64 row) const {
    return rows_per_page == 1 ? 0 : static_cast<u32>(static_cast<u64>(row) % rows_per_page) * row_bytes;
  }
  // Pages are striped round-robin over the shards.
  u32 file_of(u64 page) const { return first_file + static_cast<u32>(page % shard_count); }
  u64 offset_of(u64 page) const { return page / shard_count * page_bytes; }
  // The page that holds a byte of one of the files.
  u64 page_at(u32 file, u64 offset) const { return offset / page_bytes * shard_count + (file - first_file); }
};

}  // namespace gids::cache
