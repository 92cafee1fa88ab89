// What the kernels of the cache in device memory work on: one table's page words and lines, the missing pages of
// a minibatch, and its counters. The host (gids/cache/device/state.py) allocates all of it and packs these
// structs as arrays of 64-bit words; kernels change it in the order of one stream, so that no two kernels meet.
// Knows nothing of steps' order, files or tensors.
#pragma once

#include "gids/page_score.h"
#include "gids/page_set.h"
#include "gids/page_word.h"
#include "gids/target.h"

namespace gids::device {

// One table. Lines below device_lines lie in device memory, the others in pinned host memory, which kernels
// read and write across the bus; beside its address a line is a line.
struct Table {
  u64* words;   // [pages] page words
  u64* owners;  // [lines] page + 1, or 0: the line is free
  u8* near;     // [device_lines][page_bytes]
  u8* far;      // [lines - device_lines][page_bytes]
  u64 device_lines;
  u64 lines;
  u64 replaced;  // lines below take part in replacement; the others keep what they were filled with
  u64 row_count, rows_per_page, row_bytes, page_bytes;
  u64 policy;  // score::Policy

  GIDS_HD bool holds(i64 id) const { return static_cast<u64>(id) < row_count; }  // a negative id is a huge one
  GIDS_HD u64 page_of(i64 id) const {
    return rows_per_page == 1 ? static_cast<u64>(id) : static_cast<u64>(id) / rows_per_page;
  }
  GIDS_HD u64 offset_in_page(i64 id) const {
    return rows_per_page == 1 ? 0 : static_cast<u64>(id) % rows_per_page * row_bytes;
  }
  GIDS_HD u8* line(u64 index) const {
    return index < device_lines ? near + index * page_bytes : far + (index - device_lines) * page_bytes;
  }
};
static_assert(sizeof(Table) == 12 * 8, "the host packs a Table as 12 words");

// Of one table and step; zeroed when the step retires.
struct Counters {
  u64 pages;      // unique
  u64 bad;        // 0, or ~position of the first id that is out of range
  u64 misses;     // pages that were ABSENT when the step was planned
  u64 coalesced;  // pages that were LOADING
  u64 loads;      // misses that won a line
  u64 bypasses;   // misses that did not
  u64 evictions;
  u64 failures;    // misses whose read failed
  u64 unresolved;  // rows that gathering found nowhere
  u64 overflowed;  // 1 if a finite value became infinite in the output
  u64 spare[6];
};
static_assert(sizeof(Counters) == 16 * 8, "the host reads Counters as 16 words");

// Instead of a line, for a missing page:
constexpr u32 bypassed = 0xFFFFFFFFu;  // it won none: rows are copied from where it was read to
constexpr u32 failed = 0xFFFFFFFEu;    // its read failed

constexpr u32 no_row = 0xFFFFFFFFu;  // the end of a list of rows

// The missing pages of one minibatch, in the order in which they were found; and those that were LOADING.
struct Misses {
  PageSet set;               // page -> index into the arrays below, or `bypassed` for one that was LOADING
  u64* requests;             // [capacity] pages
  u32* scores;               // [capacity] buckets
  u32* lines;                // [capacity] the line, bypassed or failed
  u32* slots;                // [capacity] scratch: lines that came free for this minibatch
  u32* first_rows;           // [cells of set] the first of a page's rows in the minibatch, or no_row
  u32* next_rows;            // [rows] the next row of the same page, or no_row
};
static_assert(sizeof(Misses) == 9 * 8, "the host packs Misses as 9 words");

// One table's choice of victims: scratch of the planning kernels, and the clock's hand.
struct Choice {
  u32 lines[score::buckets];  // histograms; zero between plans
  u32 misses[score::buckets];
  u32 free;                             // candidate lines without a page; zero between plans
  u32 bucket, drop_lines, drop_misses;  // the cut
  u32 lines_dropped, misses_dropped;    // tickets within the bucket of the cut
  u32 taken, given;                     // slots filled, slots handed out
  u32 arrived, spare;                   // blocks that are through with a kernel; zero between kernels
  u64 hand;                             // the next candidate
  u64 first, count;                     // this plan's candidates
};
static_assert(sizeof(Choice) == (2 * score::buckets + 10) * 4 + 3 * 8, "zeroed by the host, by its size");

// Lines that a plan looks at: a few per missing page, so that its cost depends on the minibatch, not on the cache.
GIDS_HD constexpr u64 candidates(u64 lines, u64 misses) {
  const u64 wanted = misses ? 4 * misses + 1024 : 0;
  return wanted < lines ? wanted : lines;
}

}  // namespace gids::device
