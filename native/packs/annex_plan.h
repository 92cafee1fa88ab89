// The annex of a table: scratch that holds, for each step of a superbatch, a copy of every row that an offline cache of
// the memory's size misses. A step's copies are its run: successive places, read from front to back. What happens to a
// copy is decided here, once and for all: it goes to the rows of its step, and, if a later step finds it in the cache,
// to a line until the last one that does. So a reader (run_reader.h) keeps no state but its place.
//
// A superbatch is planned by four passes over its uses; then a sweep (sweep.h) writes the copies. Called by bind/.
// Knows rows, steps and bytes; knows nothing of minibatches or files.
#pragma once

#include <memory>
#include <vector>

#include "cache/geometry.h"
#include "cache/memory.h"
#include "packs/belady.h"

namespace gids::packs {

constexpr u32 runs_at_once = 4;   // that are placed by several threads
constexpr u64 block_bytes = 4096;  // runs, and the groups in which they are written, begin at multiples: direct I/O

// Bytes from one row in the annex, or in a line, to the next: groups of few rows must be whole blocks.
u64 stride_of(u64 row_bytes);
// Rows of the least number of whole blocks.
u64 block_rows(u64 stride);

struct PlanOptions {
  u64 lines = 0;                // rows that the cache has room for
  u32 group_bytes = 256 << 10;  // of a write buffer of the sweep, about
  u32 chunk_bytes = 1 << 20;    // that the sweep reads at a time
};

// How many numbers of each kind a step has in its run (Uses::read_run), in this order.
struct Moves {
  u32 copies = 0;    // rows of the run. For each one: the use that takes it; then: the line that keeps it, or no_line
  u32 repeated = 0;  // uses of rows of the run beside the first: pairs (use, the use that it repeats)
  u64 numbers() const { return 2 * (u64{copies} + repeated); }
};

struct AnnexPlan {
  cache::Geometry geometry;  // of the table
  u64 stride = 0;
  u32 steps = 0;
  u64 chunk_pages = 1;  // of the table, a multiple of the shards
  u64 group_rows = 1;
  u64 lines = 0;

  u64 copies = 0, kept = 0;    // of all runs; and those that lines keep
  std::vector<u64> run_begin;  // [steps + 1] bytes
  std::vector<Moves> moves;    // [steps]

  u64 chunk_rows() const { return chunk_pages * geometry.rows_per_page; }
  u64 chunks() const { return div_ceil(geometry.page_count(), chunk_pages); }
  u64 group_bytes() const { return group_rows * stride; }
  u64 bytes() const { return run_begin.back(); }
  u32 runs() const;  // that are not empty
};

// Plans the annex for the uses. Throws std::length_error for more lines than numbers of 31 bits, std::system_error.
std::unique_ptr<AnnexPlan> plan_annex(Uses& uses, const cache::Geometry& geometry, const PlanOptions& options,
                                      cache::Workers& workers, const Check& check);

}  // namespace gids::packs
