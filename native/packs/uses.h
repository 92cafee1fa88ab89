// The rows that each minibatch of a superbatch uses, in a scratch file, and what the passes of belady.h and lives.h
// note beside them. The passes stream the file, so memory does not grow with the uses. Knows rows and steps as
// numbers only.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "gids/target.h"

namespace gids::packs {

// Of one use: the step that uses the row next (`steps` if none does), and whether a copy of the row is at hand.
// A row that a step uses several times is noted in full once; its other uses have their own step as the next one.
namespace note {
constexpr u16 hit = 0x8000;
constexpr u32 most_steps = 0x7FFF;
constexpr u32 next_of(u16 note) { return note & (hit - 1u); }
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
  size_t bytes() const { return first_.capacity() * sizeof(u64); }

  // Uses [begin, begin + size) of a step. Any thread. Throws std::system_error.
  void read_rows(u32 step, u64 begin, std::span<u32> rows) const;
  void write_rows(u32 step, u64 begin, std::span<const u32> rows);  // from the last pass on: positions in the annex
  void read_notes(u32 step, u64 begin, std::span<u16> notes) const;
  void write_notes(u32 step, u64 begin, std::span<const u16> notes);
  // Positions of the rows that a step misses, in the order of its uses; their number is the caller's to know.
  void read_slots(u32 step, u64 begin, std::span<u32> slots) const;
  void write_slots(u32 step, std::span<const u32> slots);

 private:
  static constexpr u64 use_bytes = 2 * sizeof(u32) + sizeof(u16);

  // A step's rows, its slots, its notes.
  u64 rows_at(u32 step) const { return first_[step] * use_bytes; }
  u64 slots_at(u32 step) const { return rows_at(step) + size(step) * sizeof(u32); }
  u64 notes_at(u32 step) const { return slots_at(step) + size(step) * sizeof(u32); }
  void read(void* to, u64 bytes, u64 at) const;
  void write(const void* from, u64 bytes, u64 at);

  int fd_;
  u64 row_count_;
  std::vector<u64> first_{0};  // use of each step, and their number
};

}  // namespace gids::packs
