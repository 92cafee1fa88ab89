#include "packs/sweep.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "io/clock.h"
#include "io/start_thread.h"
#include "store/crc32c.h"
#include "store/mapped_file.h"

namespace gids::packs {
namespace {

constexpr u64 ahead = 12;     // copies whose rows are fetched before they are needed
constexpr u64 at_once = 256;   // rows of a run that are looked up together

// The reads of one chunk. The first error counts.
struct Reads final : io::Batch {
  void done(const io::Read& read, const std::byte*, int code) noexcept override {
    int none = 0;
    if (!code || !error.compare_exchange_strong(none, code)) return;
    file = read.file;
    offset = read.offset;
  }
  std::atomic<int> error{0};
  u32 file = 0;  // of the failed read
  u64 offset = 0;
};

}  // namespace

// Successive pages of the table. In memory, the pages of a shard are side by side, as in its file.
struct AnnexSweep::Chunk {
  u64 number = 0;
  std::byte* memory = nullptr;
  std::vector<std::vector<Copy>> copies;  // by lane
  std::vector<bool> wanted;               // pages
  std::shared_ptr<Reads> reads;

  std::byte* page(const AnnexPlan& plan, u64 page) const {
    const u64 shards = plan.geometry.shard_count, of_shard = plan.chunk_pages / shards;
    return memory + (page % shards * of_shard + page / shards) * plan.geometry.page_bytes;
  }
};

AnnexSweep::AnnexSweep(std::shared_ptr<io::Engine> engine, std::shared_ptr<Writer> writer,
                       std::shared_ptr<cache::Workers> workers, std::shared_ptr<const Uses> uses,
                       std::shared_ptr<const AnnexPlan> plan, const AnnexSweepOptions& options)
    : engine_(std::move(engine)),
      writer_(std::move(writer)),
      workers_(std::move(workers)),
      uses_(std::move(uses)),
      plan_(std::move(plan)),
      options_(options),
      chunk_bytes_(align_up(plan_->chunk_pages * plan_->geometry.page_bytes, block_bytes)),
      memory_(options.chunks * chunk_bytes_),
      wanted_(plan_->steps),
      groups_(plan_->steps) {
  const cache::Geometry& g = plan_->geometry;
  if (!options.chunks) throw std::invalid_argument("chunks must be 1 or more");
  const u64 buffers = u64{plan_->runs()} + 1;
  if (writer_->buffer_bytes() < plan_->group_bytes() || writer_->buffer_count() < buffers)
    throw std::invalid_argument("the sweep needs " + std::to_string(buffers) + " buffers of " +
                                std::to_string(plan_->group_bytes()) + " B; the writer has " +
                                std::to_string(writer_->buffer_count()) + " of " +
                                std::to_string(writer_->buffer_bytes()) + " B");
  if (!options.checksums.empty() && options.checksums.size() != g.page_count())
    throw std::invalid_argument("checksums: expected one for each page");
  if (uses_->steps() != plan_->steps) throw std::invalid_argument("the plan is of other uses");
  thread_ = io::start_thread("gids-annex", [this] { run(); });
}

AnnexSweep::~AnnexSweep() {
  ends_.wanted = true;
  thread_.join();
}

bool AnnexSweep::wait_for(u32 timeout_ms) {
  std::unique_lock lock(mutex_);
  return cv_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return ended_; });
}

void AnnexSweep::run() noexcept {
  const u64 begun = io::now_ns(), written = writer_->bytes_written();
  try {
    sweep();
  } catch (const std::bad_alloc&) {
    fail(ENOMEM, Failed::nothing, 0, 0);
  } catch (const std::system_error& error) {  // the copies cannot be read
    fail(error.code().value(), Failed::annex, 0, 0);
  } catch (...) {  // the engine was closed
    fail(ECANCELED, Failed::nothing, 0, 0);
  }
  for (Chunk& chunk : reading_) chunk.reads->wait();  // they write into memory
  reading_.clear();
  for (Group& group : groups_)
    if (group.buffer) writer_->give_back(group.buffer);
  if (cancelled()) writer_->abandon();
  const int error = writer_->finish();
  if (error == ECANCELED || cancelled()) fail(ECANCELED, Failed::nothing, 0, 0);
  else if (error) fail(error, Failed::annex, writer_->failed_file(), 0);
  result_.bytes_written = writer_->bytes_written() - written;
  result_.busy_ns = io::now_ns() - begun;
  std::lock_guard lock(mutex_);
  ended_ = true;
  cv_.notify_all();
}

void AnnexSweep::fail(int error, Failed failed, u32 file, u64 offset) {
  if (result_.error) return;
  result_.error = error;
  result_.failed = failed;
  result_.file = file;
  result_.offset = offset;
}

void AnnexSweep::sweep() {
  for (;;) {
    while (reading_.size() < options_.chunks && listed_ * sizeof(Copy) <= memory_.bytes() && !stopped() &&
           submit_next()) {
    }
    if (reading_.empty() || stopped()) return;
    const Chunk& chunk = reading_.front();
    chunk.reads->wait();
    verify(chunk);
    if (stopped()) return;
    workers_->parallel_for(chunk.copies.size(), 1, [&](size_t begin, size_t end, u32) {
      for (size_t lane = begin; lane < end; ++lane) copy_lane(chunk, static_cast<u32>(lane));
    });
    for (const auto& copies : chunk.copies) listed_ -= copies.size();
    reading_.pop_front();
  }
}

// Submits the reads of the next chunk that has wanted rows; false if there is none.
bool AnnexSweep::submit_next() {
  Chunk chunk;
  chunk.copies.resize(workers_->threads());
  chunk.wanted.resize(plan_->chunk_pages);
  do {
    if (next_chunk_ == plan_->chunks()) return false;
    chunk.number = next_chunk_++;
  } while (!find_copies(chunk));
  chunk.memory = memory_.data() + taken_++ % options_.chunks * chunk_bytes_;
  chunk.reads = std::make_shared<Reads>();
  add_reads(chunk);
  engine_->submit(chunk.reads);
  reading_.push_back(std::move(chunk));
  return true;
}

// Takes the chunk's rows from those that the runs want; false if there are none.
bool AnnexSweep::find_copies(Chunk& chunk) {
  const u64 begin = chunk.number * plan_->chunk_rows(), end = begin + plan_->chunk_rows();
  u64 found = 0;
  for (u32 step = 0; step < plan_->steps; ++step) {
    std::vector<Copy>& copies = chunk.copies[step % chunk.copies.size()];
    for (Wanted& w = wanted_[step];;) {
      if (w.at == w.rows.size()) {  // the next ones
        w.rows.resize(std::min<u64>(at_once, plan_->moves[step].copies - w.read));
        uses_->read_copies(step, w.read, w.rows);
        w.read += w.rows.size();
        w.at = 0;
      }
      if (w.at == w.rows.size() || w.rows[w.at] >= end) break;
      const u32 row = static_cast<u32>(w.rows[w.at++] - begin);
      copies.push_back({row, step});
      chunk.wanted[row / plan_->geometry.rows_per_page] = true;
      ++found;
    }
  }
  listed_ += found;
  return found;
}

// Of each shard, the wanted pages and the gaps between them that are short.
void AnnexSweep::add_reads(Chunk& chunk) {
  const cache::Geometry& g = plan_->geometry;
  const std::vector<bool>& wanted = chunk.wanted;
  const u64 shards = g.shard_count, first = chunk.number * plan_->chunk_pages, gap = options_.gap_bytes / g.page_bytes;
  const u64 most = std::max<u64>(engine_->max_read_bytes() / g.page_bytes, 1);
  for (u64 shard = 0; shard < shards; ++shard) {
    u64 begin = 0, end = 0;  // pages of the shard that are read together
    auto read = [&] {
      for (u64 at = begin; at < end;) {
        const u64 pages = std::min(end - at, most), page = at * shards + shard;
        chunk.reads->reads.push_back({g.offset_of(first + page), chunk.page(*plan_, page),
                                      static_cast<u32>(pages * g.page_bytes), g.file_of(first + page), 0});
        result_.bytes_read += pages * g.page_bytes;
        at += pages;
      }
    };
    for (u64 i = 0; i * shards + shard < wanted.size(); ++i) {
      if (!wanted[i * shards + shard]) continue;
      if (end && i - end > gap) {
        read();
        end = 0;
      }
      if (!end) begin = i;
      end = i + 1;
    }
    read();
  }
}

void AnnexSweep::verify(const Chunk& chunk) {
  const cache::Geometry& g = plan_->geometry;
  if (const int error = chunk.reads->error) return fail(error, Failed::table, chunk.reads->file, chunk.reads->offset);
  if (options_.checksums.empty()) return;
  for (u64 i = 0; i < chunk.wanted.size(); ++i) {
    const u64 page = chunk.number * plan_->chunk_pages + i;
    if (chunk.wanted[i] &&
        store::crc32c(chunk.page(*plan_, i), g.page_bytes) != store::value_at(&options_.checksums[page]))
      return fail(EBADMSG, Failed::table, g.file_of(page), g.offset_of(page));
  }
}

void AnnexSweep::copy_lane(const Chunk& chunk, u32 lane) {
  const cache::Geometry& g = plan_->geometry;
  const u64 row_bytes = g.row_bytes, rows_per_page = g.rows_per_page, stride = plan_->stride;
  const bool in_order = rows_per_page * row_bytes == g.page_bytes && g.shard_count == 1;
  auto row_at = [&](u64 row) {
    return in_order ? chunk.memory + row * row_bytes
                    : chunk.page(*plan_, row / rows_per_page) + row % rows_per_page * row_bytes;
  };
  const std::vector<Copy>& copies = chunk.copies[lane];
  for (size_t i = 0; i < copies.size(); ++i) {
    const Copy copy = copies[i];
    if (i + ahead < copies.size()) __builtin_prefetch(row_at(copies[i + ahead].row));
    Group& group = groups_[copy.step];
    if (!group.buffer) group.buffer = writer_->take();
    std::memcpy(group.buffer + group.rows++ * stride, row_at(copy.row), row_bytes);
    const u64 left = plan_->moves[copy.step].copies - group.number * plan_->group_rows;
    if (group.rows == std::min(plan_->group_rows, left)) write(copy.step, group);
  }
}

void AnnexSweep::write(u32 step, Group& group) {
  const u64 at = plan_->run_begin[step] + group.number * plan_->group_bytes();
  writer_->write(std::exchange(group.buffer, nullptr), align_up(group.rows * plan_->stride, block_bytes), at);
  ++group.number;
  group.rows = 0;
}

}  // namespace gids::packs
