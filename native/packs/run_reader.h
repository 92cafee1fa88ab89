// Reads a superbatch's steps from its annex, in their order. Nothing is decided here: the plan says which rows a step
// copies from lines, which from its run, and which rows of the run go to lines (moves.h). Called by bind/.
//
// The runs are read ahead in pieces, as one stream, into contiguous memory on huge pages: O_DIRECT is bound by physical
// segments. The stream goes on while the caller trains: as soon as a piece is used, the next one is asked for.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "cache/convert_rows.h"
#include "cache/memory.h"
#include "cache/workers.h"
#include "io/engine.h"
#include "packs/annex_plan.h"

namespace gids::packs {

// Memory of readers, one at a time: for the rows that lines keep, and for pieces. Lines may be elsewhere: on a device.
class RunMemory {
 public:
  // piece_bytes: about; a piece has whole rows and whole blocks.
  RunMemory(u64 lines, u64 row_bytes, u32 pieces, u64 piece_bytes, bool lines_here);

  bool lines_here() const { return lines_here_; }
  u64 lines() const { return count_of_lines_; }
  u64 stride() const { return stride_; }
  u32 pieces() const { return count_; }
  u64 piece_rows() const { return piece_rows_; }
  std::byte* line(u64 number) { return lines_.data() + number * stride_; }
  std::byte* piece(u64 number) { return pieces_.data() + number % count_ * piece_rows_ * stride_; }
  size_t bytes() const { return lines_.bytes() + pieces_.bytes(); }
  size_t pieces_bytes() const { return pieces_.bytes(); }

 private:
  bool lines_here_;
  u64 count_of_lines_, stride_, piece_rows_;
  u32 count_;
  HugeArray<std::byte> lines_, pieces_;
};

class RunReader {
 public:
  // engine: of the files that the annex is striped over. uses: that were planned. Begins to read. Throws
  // std::invalid_argument if the memory does not suit.
  RunReader(std::shared_ptr<io::Engine> engine, std::shared_ptr<cache::Workers> workers,
            std::shared_ptr<RunMemory> memory, std::shared_ptr<const Uses> uses, std::shared_ptr<const AnnexPlan> plan,
            const cache::RowForm& form);
  ~RunReader();  // waits for reads in flight
  RunReader(const RunReader&) = delete;
  RunReader& operator=(const RunReader&) = delete;

  u32 next_step() const { return step_; }
  u64 next_uses() const { return step_ < plan_->steps ? uses_->size(step_) : 0; }
  u64 out_row_bytes() const { return form_.out_row_bytes(); }

  struct Result {
    int error = 0;  // 0 or an errno: then the rows are not complete, and no further step can be read
    u32 file = 0;   // of the engine
    u64 offset = 0;
    bool overflowed = false;  // a finite value became infinite
  };
  // Writes the rows of the next step to `out`, uses.size(step) rows of form.out_row_bytes(), in the order of its uses.
  // check: see io::Engine::wait.
  Result read(std::byte* out, const std::function<void()>& check);

  // In place of read(), where lines are elsewhere. First the step's numbers: for each use the line that its row is
  // copied from, or in_run and the row of the run; and for each row of the run the line that keeps it, or no_line.
  static constexpr u32 in_run = 1u << 31;
  u64 next_copies() const { return step_ < plan_->steps ? plan_->moves[step_].copies : 0; }
  void numbers(std::span<u32> sources, std::span<u32> keeps);
  // Then its pieces, until all rows of the run came. Waits. The memory of a piece is read into again after
  // free_piece(), the oldest one first.
  struct View {
    Result result;
    const std::byte* memory = nullptr;
    u64 first = 0, rows = 0;  // of the run
  };
  View next_piece(const std::function<void()>& check);
  void free_piece();
  void end_step();

  struct Stats {
    u64 steps = 0, rows = 0, bytes_read = 0, wait_ns = 0, gather_ns = 0;
  };
  const Stats& stats() const { return stats_; }

 private:
  struct Piece;

  void submit_ahead();
  bool gather_lines(std::byte* out);
  bool use_piece(const Piece& piece, std::byte* out);

  std::shared_ptr<io::Engine> engine_;
  std::shared_ptr<cache::Workers> workers_;
  std::shared_ptr<RunMemory> memory_;
  std::shared_ptr<const Uses> uses_;
  std::shared_ptr<const AnnexPlan> plan_;
  const cache::RowForm form_;
  u32 step_ = 0;
  std::deque<Piece> reading_;       // oldest first
  size_t taken_ = 0;                // of these by next_piece()
  u64 submitted_ = 0;               // pieces so far
  u32 ahead_step_ = 0;              // of the next piece,
  u64 ahead_row_ = 0;               // which begins with this row of the step's run
  std::vector<u32> lines_, run_;    // of the step that is read
  Stats stats_;
};

}  // namespace gids::packs
