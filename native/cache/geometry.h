// The layout of a table's rows in pages and of its pages in shards. Shared by the cache's parts; knows no files.
//
// A table's pages may go on in scratch: its annex. Page page_count() is the first one there, and row annex_row() its
// first row. Files and offsets of these pages are given here; to most of the cache they are pages as others.
#pragma once

#include <stdexcept>
#include <string>

#include "gids/target.h"

namespace gids::cache {

struct Geometry {
  u64 row_count;
  u32 row_bytes;
  u32 page_bytes;
  u32 rows_per_page;  // a row longer than a page would have one long page to itself
  u32 shard_count;
  u32 first_file;  // the engine's number of shard 0; the others follow
  u64 annex_pages = 0;
  u32 annex_file = 0;   // the engine's number of the annex's first file; above those of the shards
  u32 annex_files = 1;  // that the annex is striped over

  static constexpr u64 stripe_bytes = 1u << 20;  // of an annex; those of packs::Stripes

  void validate() const {
    if (!row_bytes || !page_bytes || !rows_per_page || !shard_count || u64{row_bytes} * rows_per_page > page_bytes)
      throw std::invalid_argument("a page does not hold its rows");
    if (annex_pages && (!annex_files || annex_file < first_file + shard_count))
      throw std::invalid_argument("the annex must be in files after those of the table");
    if (annex_pages && annex_files > 1 && stripe_bytes % page_bytes)
      throw std::invalid_argument("pages of " + std::to_string(page_bytes) +
                                  " B do not fill stripes of 1 MiB: the annex must be one file");
  }
  u64 page_count() const { return div_ceil(row_count, rows_per_page); }  // of the table
  u64 all_pages() const { return page_count() + annex_pages; }
  u64 annex_row() const { return page_count() * rows_per_page; }
  u64 row_end() const { return annex_pages ? all_pages() * rows_per_page : row_count; }  // positions are below it
  bool in_annex(u64 page) const { return page >= page_count(); }
  u64 page_of(i64 row) const {
    return rows_per_page == 1 ? static_cast<u64>(row) : static_cast<u64>(row) / rows_per_page;
  }
  u32 offset_in_page(i64 row) const {
    return rows_per_page == 1 ? 0 : static_cast<u32>(static_cast<u64>(row) % rows_per_page) * row_bytes;
  }
  // Pages are striped round-robin over the shards.
  u32 file_of(u64 page) const {
    if (!annex_pages || !in_annex(page)) return first_file + static_cast<u32>(page % shard_count);
    if (annex_files == 1) return annex_file;
    return annex_file + static_cast<u32>(stripe_of(page - page_count()) % annex_files);
  }
  u64 offset_of(u64 page) const {
    if (!annex_pages || !in_annex(page)) return page / shard_count * page_bytes;
    const u64 at = (page - page_count()) * page_bytes;
    if (annex_files == 1) return at;
    return at / stripe_bytes / annex_files * stripe_bytes + at % stripe_bytes;
  }
  // The page that holds a byte of one of the files.
  u64 page_at(u32 file, u64 offset) const {
    if (!annex_pages || file < annex_file) return offset / page_bytes * shard_count + (file - first_file);
    if (annex_files > 1)
      offset = (offset / stripe_bytes * annex_files + (file - annex_file)) * stripe_bytes + offset % stripe_bytes;
    return page_count() + offset / page_bytes;
  }

 private:
  u64 stripe_of(u64 annex_page) const { return annex_page * page_bytes / stripe_bytes; }
};

}  // namespace gids::cache
