// The annex of a table: pages in scratch that hold, for each step of a superbatch, a copy of every row that the cache
// will not have. A step's copies are its run: successive slots, read from front to back. Copies that an offline Belady
// cache keeps as long lie together, so that a page's rows die at one step, which is known.
//
// A superbatch is planned by four passes over its uses (belady.h, lives.h); then a sweep (annex_sweep.h) writes the
// copies. Called by bind/. Knows rows, steps and pages; knows nothing of minibatches, files or lines.
#pragma once

#include <memory>
#include <vector>

#include "cache/geometry.h"
#include "cache/memory.h"
#include "packs/belady.h"

namespace gids::packs {

struct PlanOptions {
  u64 capacity_rows = 0;        // that the offline cache keeps from step to step
  u32 group_bytes = 256 << 10;  // of a write buffer of the sweep; copies are sorted by death inside one
  u32 chunk_bytes = 1 << 20;    // that the sweep reads at a time
};

// A copy that the sweep makes.
struct Copy {
  u32 slot;          // in the annex
  u16 row_in_chunk;  // which row of the chunk
  u16 step;          // whose run has the slot
};
static_assert(sizeof(Copy) == 8, "memory of a plan: 8 bytes a copy");

struct AnnexPlan {
  static constexpr u64 direct_alignment = 4096;  // runs and groups begin and end at multiples, for direct I/O

  // The layout; see plan_annex().
  cache::Geometry geometry;
  u32 steps = 0;
  u32 lanes = 1;       // threads of the sweep; a run has one of them
  u64 chunk_pages = 1;  // of the table, a multiple of the shards
  u64 group_pages = 1;  // of the annex

  // What the passes find.
  u64 copies = 0;
  u64 once = 0;                    // copies that only the step of their run uses
  std::vector<u64> first_page;     // [steps + 1] of each run; and the pages of all
  std::vector<u64> missed;         // [steps] copies of each run
  std::vector<u16> page_dies;      // [pages] the last step that uses a row of it
  std::vector<u64> list_begin;     // [chunks * lanes + 1]
  HugeArray<Copy> list;            // [copies] by chunk of the table and lane; until the sweep has made them
  std::vector<u32> dying;          // pages that a later step than that of their run uses, by the step at which they die
  std::vector<u64> dying_begin;    // [steps + 1]

  u64 chunk_rows() const { return chunk_pages * geometry.rows_per_page; }
  u64 group_rows() const { return group_pages * geometry.rows_per_page; }
  u64 chunks() const { return div_ceil(geometry.page_count(), chunk_pages); }
  u64 page_count() const { return first_page.back(); }
  u64 bytes() const { return page_count() * geometry.page_bytes; }
  u64 first_slot(u32 step) const { return first_page[step] * geometry.rows_per_page; }
  size_t memory_bytes() const;
  // The most lines that pages need, if a run is read as soon as the step `ahead` before its own is due. Pages that die
  // with the step of their run need none.
  u64 lines_needed(u32 ahead) const;
};

// Plans the annex for the uses, and turns these into positions: slots of the annex. Throws std::invalid_argument for
// pages that the sweep cannot hold, std::length_error for more slots than positions of 4 bytes have, std::system_error.
std::unique_ptr<AnnexPlan> plan_annex(Uses& uses, const cache::Geometry& geometry, const PlanOptions& options,
                                      cache::Workers& workers, const Check& check);

}  // namespace gids::packs
