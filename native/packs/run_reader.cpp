#include "packs/run_reader.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "cache/copy.h"
#include "io/clock.h"
#include "packs/stripes.h"

namespace gids::packs {
namespace {

constexpr size_t block = 64;  // rows that are copied by one call
constexpr size_t task_bytes = 256 << 10;

// The reads of one piece. The first error counts.
struct Reads final : io::Batch {
  void done(const io::Read& read, const std::byte*, int code) noexcept override {
    int none = 0;
    if (!code || !error.compare_exchange_strong(none, code)) return;
    file = read.file;
    offset = read.offset;
  }
  std::atomic<int> error{0};
  u32 file = 0;
  u64 offset = 0;
};

}  // namespace

// Rows of one run.
struct RunReader::Piece {
  std::byte* memory;
  u32 step;
  u32 first, rows;
  std::shared_ptr<Reads> reads;
};

RunMemory::RunMemory(u64 lines, u64 row_bytes, u32 pieces, u64 piece_bytes, bool lines_here)
    : lines_here_(lines_here),
      count_of_lines_(lines),
      stride_(stride_of(row_bytes)),
      piece_rows_(std::max<u64>(piece_bytes / (block_rows(stride_) * stride_), 1) * block_rows(stride_)),
      count_(pieces),
      lines_(lines_here ? lines * stride_ : 0),
      pieces_(pieces * piece_rows_ * stride_) {
  if (!pieces) throw std::invalid_argument("pieces must be 1 or more");
}

RunReader::RunReader(std::shared_ptr<io::Engine> engine, std::shared_ptr<cache::Workers> workers,
                     std::shared_ptr<RunMemory> memory, std::shared_ptr<const Uses> uses,
                     std::shared_ptr<const AnnexPlan> plan, const cache::RowForm& form)
    : engine_(std::move(engine)),
      workers_(std::move(workers)),
      memory_(std::move(memory)),
      uses_(std::move(uses)),
      plan_(std::move(plan)),
      form_(form) {
  form_.validate();
  if (memory_->stride() != plan_->stride || memory_->lines() < plan_->lines || form_.row_bytes > plan_->stride)
    throw std::invalid_argument("the memory is for other rows than those of the plan, or for fewer");
  if (uses_->steps() != plan_->steps) throw std::invalid_argument("the plan is of other uses");
  submit_ahead();
}

RunReader::~RunReader() {
  for (const Piece& piece : reading_) engine_->cancel(*piece.reads);
  for (const Piece& piece : reading_) piece.reads->wait();
}

void RunReader::submit_ahead() {
  const Stripes stripes{engine_->file_count()};
  while (reading_.size() < memory_->pieces() && ahead_step_ < plan_->steps) {
    const u64 left = plan_->moves[ahead_step_].copies - ahead_row_;
    if (!left) {
      ++ahead_step_;
      ahead_row_ = 0;
      continue;
    }
    const u64 rows = std::min(left, memory_->piece_rows());
    Piece piece{memory_->piece(submitted_), ahead_step_, static_cast<u32>(ahead_row_), static_cast<u32>(rows),
                std::make_shared<Reads>()};
    u64 at = plan_->run_begin[ahead_step_] + ahead_row_ * plan_->stride;
    std::byte* to = piece.memory;
    for (u64 bytes = align_up(rows * plan_->stride, block_bytes); bytes;) {
      const Stripes::Place place = stripes.at(at);
      const u64 n = std::min({bytes, place.room, u64{engine_->max_read_bytes()}});
      piece.reads->reads.push_back({place.offset, to, static_cast<u32>(n), place.file, 0});
      at += n;
      to += n;
      bytes -= n;
    }
    stats_.bytes_read += static_cast<u64>(to - piece.memory);
    engine_->submit(piece.reads);
    reading_.push_back(std::move(piece));
    ++submitted_;
    ahead_row_ += rows;
  }
}

RunReader::Result RunReader::read(std::byte* out, const std::function<void()>& check) {
  if (step_ == plan_->steps) throw std::out_of_range("all steps of the superbatch were read");
  if (!memory_->lines_here()) throw std::logic_error("the lines are elsewhere");
  const u64 begun = io::now_ns();
  u64 waited = 0;
  const Moves& moves = plan_->moves[step_];
  Result result;
  run_.resize(moves.numbers());
  uses_->read_run(step_, run_);
  lines_.resize(uses_->size(step_));
  uses_->read_lines(step_, lines_);
  result.overflowed = gather_lines(out);  // before lines are given to new copies
  for (u32 rows = 0; rows < moves.copies;) {
    const Piece& piece = reading_.front();
    const u64 before = io::now_ns();
    engine_->wait(*piece.reads, check);
    waited += io::now_ns() - before;
    if (const int error = piece.reads->error) return {error, piece.reads->file, piece.reads->offset, false};
    result.overflowed |= use_piece(piece, out);
    rows += piece.rows;
    reading_.pop_front();
    submit_ahead();
  }
  const u64 row_bytes = form_.out_row_bytes();
  for (u32 i = 2 * moves.copies; i < run_.size(); i += 2)
    std::memcpy(out + run_[i] * row_bytes, out + run_[i + 1] * row_bytes, row_bytes);
  end_step();
  stats_.rows += lines_.size();
  stats_.wait_ns += waited;
  stats_.gather_ns += io::now_ns() - begun - waited;
  return result;
}

void RunReader::numbers(std::span<u32> sources, std::span<u32> keeps) {
  if (step_ == plan_->steps) throw std::out_of_range("all steps of the superbatch were read");
  const Moves& moves = plan_->moves[step_];
  run_.resize(moves.numbers());
  uses_->read_run(step_, run_);
  uses_->read_lines(step_, sources);
  for (u32 i = 0; i < moves.copies; ++i) sources[run_[i]] = in_run | i;
  for (u32 i = 2 * moves.copies; i < run_.size(); i += 2) sources[run_[i]] = sources[run_[i + 1]];
  std::copy_n(run_.begin() + moves.copies, moves.copies, keeps.begin());
}

RunReader::View RunReader::next_piece(const std::function<void()>& check) {
  if (taken_ == reading_.size()) throw std::logic_error("the memory of pieces is in use");
  const Piece& piece = reading_[taken_];
  if (piece.step != step_) throw std::logic_error("all pieces of the step were read");
  const u64 before = io::now_ns();
  engine_->wait(*piece.reads, check);
  stats_.wait_ns += io::now_ns() - before;
  if (const int error = piece.reads->error) return {{error, piece.reads->file, piece.reads->offset, false}};
  ++taken_;
  return {{}, piece.memory, piece.first, piece.rows};
}

void RunReader::free_piece() {
  if (!taken_) throw std::logic_error("no piece is in use");
  --taken_;
  reading_.pop_front();
  submit_ahead();
}

void RunReader::end_step() {
  ++step_;
  ++stats_.steps;
}

// Copies what lines have to the rows of the step. Returns whether a finite value became infinite; as the next one.
bool RunReader::gather_lines(std::byte* out) {
  const u64 out_bytes = form_.out_row_bytes();
  const bool streaming = lines_.size() * out_bytes >= cache::streaming_bytes;
  std::atomic<bool> overflowed{false};
  const size_t grain = std::max<u64>(task_bytes / out_bytes, block);
  workers_->parallel_for(lines_.size(), grain, [&](size_t begin, size_t end, u32) {
    std::array<const std::byte*, block> from;
    std::array<std::byte*, block> to;
    for (size_t i = begin; i < end;) {
      size_t n = 0;
      for (; i < end && n < block; ++i) {
        from[n] = memory_->line(lines_[i]);
        to[n] = out + i * out_bytes;
        n += lines_[i] != no_line;
      }
      if (cache::convert_rows(form_, from.data(), to.data(), n, streaming))
        overflowed.store(true, std::memory_order_relaxed);
    }
  });
  return overflowed;
}

// Copies the rows of a piece to those of the step, and to the lines that keep them.
bool RunReader::use_piece(const Piece& piece, std::byte* out) {
  const u64 out_bytes = form_.out_row_bytes(), stride = plan_->stride;
  const u32* const uses = run_.data() + piece.first;
  const u32* const lines = uses + plan_->moves[step_].copies;
  const bool streaming = lines_.size() * out_bytes >= cache::streaming_bytes;
  std::atomic<bool> overflowed{false};
  workers_->parallel_for(piece.rows, std::max<u64>(task_bytes / stride, block), [&](size_t begin, size_t end, u32) {
    std::array<const std::byte*, block> from;
    std::array<std::byte*, block> to;
    for (size_t first = begin; first < end; first += block) {
      const size_t last = std::min(end, first + block);
      for (size_t i = first; i < last; ++i) {
        from[i - first] = piece.memory + i * stride;
        to[i - first] = out + uses[i] * out_bytes;
      }
      if (cache::convert_rows(form_, from.data(), to.data(), last - first, streaming))
        overflowed.store(true, std::memory_order_relaxed);
      size_t n = 0;
      for (size_t i = first; i < last; ++i) {
        if (lines[i] == no_line) continue;
        from[n] = piece.memory + i * stride;
        to[n++] = memory_->line(lines[i]);
      }
      cache::copy_rows(from.data(), to.data(), n, form_.row_bytes, streaming);
    }
  });
  return overflowed;
}

}  // namespace gids::packs
