// The rows that each minibatch of a superbatch uses, in a scratch file. The passes (belady.h, annex_plan.h) stream it,
// so that memory does not grow with the uses; the last one leaves there what a step's reader needs (moves.h). Knows
// rows and steps as numbers only.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "gids/target.h"

namespace gids::packs {

// What a pass notes of one use. The first two passes: the step that uses the row next (the number of steps if none
// does) and whether a copy is at hand. A row that a step uses several times is noted in full once; its other uses
// have their own step as the next one.
namespace note {
constexpr u16 hit = 0x8000;
constexpr u32 most_steps = 0x7FFF;
constexpr u32 next_of(u16 note) { return note & (hit - 1u); }

// From the third pass on:
enum : u16 {
  passes = 0,    // a new copy, of no use to later steps
  enters = 1,    // a new copy, which a line keeps
  in_line = 2,   // a copy that a line has
  leaves = 3,    // the same, for the last time
  repeated = 4,  // the step uses the row elsewhere, too
};
}  // namespace note

class Uses {
 public:
  // fd: of an empty file, open for reading and writing through the page cache (without O_DIRECT). A duplicate is kept.
  // row_count: of the table, below 2^32. Throws std::invalid_argument, std::system_error.
  Uses(int fd, u64 row_count);
  ~Uses();
  Uses(const Uses&) = delete;
  Uses& operator=(const Uses&) = delete;

  // The rows of the next step, which may repeat. Throws std::out_of_range for a row outside the table,
  // std::length_error for too many steps, std::system_error.
  void append(std::span<const u32> rows);

  u64 row_count() const { return row_count_; }
  u32 steps() const { return static_cast<u32>(first_.size() - 1); }
  u64 size() const { return first_.back(); }  // uses of all steps
  u64 size(u32 step) const { return first_[step + 1] - first_[step]; }
  u64 longest() const;  // uses of the step that has most
  size_t bytes() const { return first_.capacity() * sizeof(u64); }

  static constexpr u64 use_bytes = 16;  // of the file

  // Uses [begin, begin + size) of a step. Any thread. Throws std::system_error.
  void read_rows(u32 step, u64 begin, std::span<u32> rows) const;
  void read_notes(u32 step, u64 begin, std::span<u16> notes) const;
  void write_notes(u32 step, u64 begin, std::span<const u16> notes);

  // After the last pass, in their place: the line that each use of a step is copied from, or no_line, …
  void read_lines(u32 step, std::span<u32> lines) const { read(lines.data(), lines.size_bytes(), at(step)); }
  void write_lines(u32 step, u64 begin, std::span<const u32> lines);
  // … what happens to the copies of its run, at most 2 numbers for each use, …
  void read_run(u32 step, std::span<u32> run) const { read(run.data(), run.size_bytes(), run_at(step)); }
  void write_run(u32 step, std::span<const u32> run) { write(run.data(), run.size_bytes(), run_at(step)); }
  // … and the rows of these copies, at most one for each use.
  void read_copies(u32 step, u64 begin, std::span<u32> rows) const;
  void write_copies(u32 step, std::span<const u32> rows) { write(rows.data(), rows.size_bytes(), copies_at(step)); }

 private:
  // A step's rows, or lines; then its notes, or its run; then the rows of its copies.
  u64 at(u32 step) const { return first_[step] * use_bytes; }
  u64 run_at(u32 step) const { return at(step) + size(step) * sizeof(u32); }
  u64 copies_at(u32 step) const { return run_at(step) + size(step) * 2 * sizeof(u32); }
  void read(void* to, u64 bytes, u64 at) const;
  void write(const void* from, u64 bytes, u64 at);

  int fd_;
  u64 row_count_;
  std::vector<u64> first_{0};  // use of each step, and their number
};

constexpr u32 no_line = 0xFFFFFFFF;

}  // namespace gids::packs
