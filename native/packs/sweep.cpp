#include "packs/sweep.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "io/clock.h"
#include "io/start_thread.h"
#include "store/crc32c.h"
#include "store/mapped_file.h"

namespace gids::packs {
namespace {

constexpr u64 ahead = 12;  // copies whose rows are fetched before they are needed

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
  std::vector<bool> wanted;  // pages
  std::shared_ptr<Reads> reads;

  std::byte* page(const AnnexPlan& plan, u64 page) const {
    const u64 shards = plan.geometry.shard_count, of_shard = plan.chunk_pages / shards;
    return memory + (page % shards * of_shard + page / shards) * plan.geometry.page_bytes;
  }
};

AnnexSweep::AnnexSweep(std::shared_ptr<io::Engine> engine, std::shared_ptr<Writer> writer,
                       std::shared_ptr<cache::Workers> workers, std::shared_ptr<AnnexPlan> plan,
                       const AnnexSweepOptions& options)
    : engine_(std::move(engine)),
      writer_(std::move(writer)),
      workers_(std::move(workers)),
      plan_(std::move(plan)),
      options_(options),
      chunk_bytes_(align_up(plan_->chunk_pages * plan_->geometry.page_bytes, block_bytes)),
      memory_(options.chunks * chunk_bytes_),
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
  if (plan_->list.size() != plan_->copies) throw std::logic_error("the plan was swept already");
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
  plan_->list = HugeArray<Copy>();
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
    while (reading_.size() < options_.chunks && !stopped() && submit_next()) {
    }
    if (reading_.empty() || stopped()) return;
    const Chunk& chunk = reading_.front();
    chunk.reads->wait();
    verify(chunk);
    if (stopped()) return;
    workers_->parallel_for(plan_->lanes, 1, [&](size_t begin, size_t end, u32) {
      for (size_t lane = begin; lane < end; ++lane) copy_lane(chunk, static_cast<u32>(lane));
    });
    reading_.pop_front();
  }
}

// Submits the reads of the next chunk that has wanted rows; false if there is none.
bool AnnexSweep::submit_next() {
  const std::vector<u64>& lists = plan_->list_begin;
  const u64 lanes = plan_->lanes;
  while (next_chunk_ < plan_->chunks() && lists[next_chunk_ * lanes] == lists[(next_chunk_ + 1) * lanes]) ++next_chunk_;
  if (next_chunk_ == plan_->chunks()) return false;
  Chunk chunk;
  chunk.number = next_chunk_++;
  chunk.memory = memory_.data() + taken_++ % options_.chunks * chunk_bytes_;
  chunk.wanted.resize(plan_->chunk_pages);
  for (u64 i = lists[chunk.number * lanes]; i < lists[(chunk.number + 1) * lanes]; ++i)
    chunk.wanted[plan_->list[i].row_in_chunk / plan_->geometry.rows_per_page] = true;
  chunk.reads = std::make_shared<Reads>();
  add_reads(chunk, chunk.wanted);
  engine_->submit(chunk.reads);
  reading_.push_back(std::move(chunk));
  return true;
}

// Of each shard, the wanted pages and the gaps between them that are short.
void AnnexSweep::add_reads(Chunk& chunk, std::vector<bool>& wanted) {
  const cache::Geometry& g = plan_->geometry;
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
  const u64 list = chunk.number * plan_->lanes + lane;
  const u64 begin = plan_->list_begin[list], end = plan_->list_begin[list + 1];
  for (u64 i = begin; i < end; ++i) {
    const Copy copy = plan_->list[i];
    if (i + ahead < end) __builtin_prefetch(row_at(plan_->list[i + ahead].row_in_chunk));
    Group& group = groups_[copy.step];
    if (!group.buffer) group.buffer = writer_->take();
    std::memcpy(group.buffer + group.rows++ * stride, row_at(copy.row_in_chunk), row_bytes);
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
