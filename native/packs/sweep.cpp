#include "packs/sweep.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <utility>

#include "io/clock.h"
#include "io/start_thread.h"
#include "store/crc32c.h"
#include "store/mapped_file.h"

namespace gids::packs {
namespace {

constexpr size_t direct_alignment = 4096;   // for direct I/O
constexpr size_t most_pieces = 256;         // in memory
constexpr size_t distributed_at_once = 64;  // pieces that are distributed at a time
constexpr size_t copy_bytes = 128u << 10;   // that a thread copies at a time

}  // namespace

void Priority::begin_urgent() {
  std::lock_guard lock(mutex_);
  ++urgent_;
}

void Priority::end_urgent() {
  {
    std::lock_guard lock(mutex_);
    --urgent_;
  }
  cv_.notify_all();
}

void Priority::yield(const std::atomic<bool>& stop) {
  std::unique_lock lock(mutex_);
  while (urgent_ && !stop.load(std::memory_order_relaxed)) cv_.wait_for(lock, std::chrono::milliseconds(100));
}

// Successive pages, of which each shard's are contiguous in its file and in memory.
struct Sweep::Piece {
  // The reads of a piece: one for each shard that has some of its pages.
  struct Reads final : io::Batch {
    void done(const io::Read&, const std::byte*, int error) noexcept override {
      if (error) failed.store(true, std::memory_order_relaxed);
    }
    std::atomic<bool> failed{false};
  };

  u64 first = 0, end = 0;  // pages
  std::byte* memory = nullptr;
  size_t bytes = 0;
  std::shared_ptr<Reads> reads;

  const std::byte* page(const cache::Geometry& g, u64 page) const {
    if (g.shard_count == 1) return memory + (page - first) * g.page_bytes;
    const u64 i = page - first, shard = i % g.shard_count, pages = end - first;
    // The shards before this one have a page more than the others if the pages do not divide.
    const u64 before = shard * (pages / g.shard_count) + std::min(shard, pages % g.shard_count);
    return memory + (before + i / g.shard_count) * g.page_bytes;
  }
};

// The pieces of a table that hold wanted pages, in ascending order.
class Sweep::WantedPieces {
 public:
  WantedPieces(const TableSweep& table, const SweepOptions& options)
      : geometry_(table.geometry),
        most_pages_(options.piece_bytes / geometry_.page_bytes),
        gap_pages_(options.gap_bytes / geometry_.page_bytes * geometry_.shard_count),
        rows_(geometry_.row_count) {
    for (const Target& target : table.targets) target.rows->insert_into(rows_);
  }

  // Sets the pages and bytes of the next piece; false if there is none.
  bool next(Piece& piece) {
    const u64 pages = geometry_.page_count();
    while (next_ < pages && !is_wanted(next_)) ++next_;
    if (next_ == pages) return false;
    piece.first = next_;
    piece.end = next_ + 1;
    const u64 end = std::min(pages, piece.first + most_pages_);
    for (u64 page = next_ + 1; page < end && page - piece.end <= gap_pages_; ++page)
      if (is_wanted(page)) piece.end = page + 1;
    next_ = piece.end;
    piece.bytes = align_up((piece.end - piece.first) * geometry_.page_bytes, direct_alignment);
    return true;
  }

 private:
  bool is_wanted(u64 page) const {
    return rows_.any(page * geometry_.rows_per_page,
                     std::min(geometry_.row_count, (page + 1) * geometry_.rows_per_page));
  }

  const cache::Geometry& geometry_;
  const u64 most_pages_, gap_pages_;
  RowSet rows_;
  u64 next_ = 0;  // the first page that is not in a piece yet
};

// Pieces in memory one after the other, as in a ring.
struct Sweep::Ring {
  HugeArray<std::byte>& memory;
  std::deque<Piece> pieces;

  // Also when an exception ends the sweep: reads in flight write into memory. A piece that was not submitted has none.
  ~Ring() {
    for (Piece& piece : pieces)
      if (piece.reads) piece.reads->wait();
  }

  // For one more piece; null until earlier ones are taken out.
  std::byte* room_for(size_t bytes) const {
    std::byte* const begin = memory.data();
    if (pieces.empty()) return begin;
    std::byte* const used = pieces.front().memory;
    std::byte* const at = pieces.back().memory + pieces.back().bytes;
    if (at <= used) return bytes <= static_cast<size_t>(used - at) ? at : nullptr;
    if (bytes <= static_cast<size_t>(begin + memory.bytes() - at)) return at;
    return bytes <= static_cast<size_t>(used - begin) ? begin : nullptr;
  }
};

// The end of one target's rows that is being filled.
struct Sweep::Output {
  explicit Output(const Target& of) : target(of), next(*of.rows) {}

  const Target& target;
  RowList::Cursor next;         // the row that is copied next
  std::byte* buffer = nullptr;  // of the writer
  size_t filled = 0;            // bytes of the buffer
  u64 written = 0;              // bytes given to the writer, or copied to memory

  void append(const std::byte* row, size_t bytes, Writer* writer) {
    while (bytes) {
      if (!buffer) buffer = writer->take();
      const size_t n = std::min(bytes, writer->buffer_bytes() - filled);
      std::memcpy(buffer + filled, row, n);
      filled += n;
      row += n;
      bytes -= n;
      if (filled == writer->buffer_bytes()) flush(writer);
    }
  }
  // The last buffer is filled up with zeros to what direct I/O takes.
  void flush(Writer* writer) {
    if (!buffer) return;
    const size_t bytes = align_up(filled, direct_alignment);
    std::memset(buffer + filled, 0, bytes - filled);
    writer->write(buffer, bytes, target.offset + written);
    written += filled;
    buffer = nullptr;
    filled = 0;
  }
};

Sweep::Sweep(std::shared_ptr<io::Engine> engine, std::shared_ptr<Writer> writer, std::shared_ptr<Priority> priority,
             std::vector<TableSweep> tables, const SweepOptions& options)
    : engine_(std::move(engine)),
      writer_(std::move(writer)),
      priority_(std::move(priority)),
      tables_(std::move(tables)),
      options_(options),
      memory_(u64{options.pieces} * align_up(u64{options.piece_bytes}, direct_alignment)),
      workers_(options.threads) {
  for (const TableSweep& table : tables_) {
    table.geometry.validate();
    if (table.geometry.page_bytes > options_.piece_bytes)
      throw std::invalid_argument("a sweep reads pieces of " + std::to_string(options_.piece_bytes) +
                                  " B, and a page has " + std::to_string(table.geometry.page_bytes));
    for (const Target& target : table.targets) {
      if (target.rows->row_count() != table.geometry.row_count)
        throw std::invalid_argument("a target's rows are not those of its table");
      if (!target.memory && (!writer_ || writer_->buffer_count() <= table.targets.size()))
        throw std::invalid_argument("the writer has fewer buffers than a sweep's targets need");
    }
  }
  if (!writer_) urgent_.emplace(priority_);
  thread_ = io::start_thread("gids-sweep", [this] { run(); });
}

Sweep::~Sweep() {
  cancel();
  thread_.join();
}

void Sweep::cancel() {
  stop_.store(true, std::memory_order_relaxed);
  std::lock_guard lock(mutex_);
  if (writer_ && !ended_) writer_->abandon();
}

bool Sweep::wait_for(u32 timeout_ms) {
  std::unique_lock lock(mutex_);
  return cv_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return ended_; });
}

void Sweep::run() noexcept {
  const u64 begun = io::now_ns();
  try {
    for (const TableSweep& table : tables_) {
      if (stop_.load(std::memory_order_relaxed)) break;
      sweep(table);
      if (writer_ && writer_->error()) break;
    }
  } catch (const std::bad_alloc&) {
    error_ = ENOMEM;
  } catch (...) {  // the engine was closed
    error_ = ECANCELED;
  }
  if (writer_) {
    const int failed = writer_->finish();
    if (!error_) error_ = failed;
  }
  if (!error_ && stop_.load(std::memory_order_relaxed)) error_ = ECANCELED;
  busy_ns_ = io::now_ns() - begun;
  urgent_.reset();
  std::lock_guard lock(mutex_);
  ended_ = true;
  cv_.notify_all();
}

void Sweep::sweep(const TableSweep& table) {
  std::vector<Output> outputs;
  for (const Target& target : table.targets) outputs.emplace_back(target);
  WantedPieces wanted(table, options_);
  Ring ring{memory_, {}};
  auto stopped = [&] { return stop_.load(std::memory_order_relaxed) || (writer_ && writer_->error()); };

  Piece coming;  // not read yet
  bool more = wanted.next(coming);
  while (more || !ring.pieces.empty()) {
    while (more && ring.pieces.size() < most_pieces && !stopped()) {
      coming.memory = ring.room_for(coming.bytes);
      if (!coming.memory) break;
      if (writer_) priority_->yield(stop_);
      ring.pieces.push_back(std::exchange(coming, Piece()));
      submit(table.geometry, ring.pieces.back());
      more = wanted.next(coming);
    }
    if (stopped()) break;
    // Short pieces are distributed together.
    size_t count = 0, bytes = 0;
    while (count < std::min(ring.pieces.size(), distributed_at_once) && bytes < options_.piece_bytes) {
      Piece& piece = ring.pieces[count++];
      piece.reads->wait();
      repair(table, piece);
      bytes += piece.bytes;
    }
    distribute(table, ring.pieces, count, outputs);
    ring.pieces.erase(ring.pieces.begin(), ring.pieces.begin() + static_cast<std::ptrdiff_t>(count));
  }
  for (Output& output : outputs) {
    if (!output.buffer) continue;
    if (stopped()) writer_->give_back(output.buffer);
    else output.flush(writer_.get());
  }
}

void Sweep::submit(const cache::Geometry& g, Piece& piece) {
  piece.reads = std::make_shared<Piece::Reads>();
  for (u64 shard = 0; shard < g.shard_count && piece.first + shard < piece.end; ++shard) {
    const u64 page = piece.first + shard, bytes = div_ceil(piece.end - page, g.shard_count) * g.page_bytes;
    std::byte* const to = const_cast<std::byte*>(piece.page(g, page));
    for (u64 at = 0; at < bytes; at += engine_->max_read_bytes())
      piece.reads->reads.push_back({g.offset_of(page) + at, to + at,
                                    static_cast<u32>(std::min<u64>(bytes - at, engine_->max_read_bytes())),
                                    g.file_of(page), 0});
    bytes_read_ += bytes;
  }
  engine_->submit(piece.reads);
}

// Reads the pages of a failed piece one by one, so that only those that cannot be read are lost; compares checksums.
void Sweep::repair(const TableSweep& table, Piece& piece) {
  const cache::Geometry& g = table.geometry;
  const size_t before = bad_pages_.size();
  if (piece.reads->failed.load(std::memory_order_relaxed)) {
    struct Pages final : io::Batch {
      void done(const io::Read& read, const std::byte*, int error) noexcept override { errors[read.cookie] = error; }
      std::vector<int> errors;
    };
    auto batch = std::make_shared<Pages>();
    batch->errors.resize(piece.end - piece.first);
    for (u64 page = piece.first; page < piece.end; ++page)
      batch->reads.push_back({g.offset_of(page), const_cast<std::byte*>(piece.page(g, page)), g.page_bytes,
                              g.file_of(page), page - piece.first});
    engine_->submit(batch);
    batch->wait();
    for (u64 page = piece.first; page < piece.end; ++page)
      if (const int error = batch->errors[page - piece.first]) {
        bad_pages_.push_back({g.file_of(page), g.offset_of(page), error});
        std::memset(const_cast<std::byte*>(piece.page(g, page)), 0, g.page_bytes);
      }
  }
  if (table.checksums.empty()) return;
  const std::vector<BadPage> unread(bad_pages_.begin() + static_cast<std::ptrdiff_t>(before), bad_pages_.end());
  for (u64 page = piece.first; page < piece.end; ++page) {
    if (store::crc32c(piece.page(g, page), g.page_bytes) == store::value_at(&table.checksums[page])) continue;
    const bool known = std::any_of(unread.begin(), unread.end(), [&](const BadPage& bad) {
      return bad.file == g.file_of(page) && bad.offset == g.offset_of(page);
    });
    if (!known) bad_pages_.push_back({g.file_of(page), g.offset_of(page), EBADMSG});
  }
}

// Copies the rows of the first pieces: to files, several outputs at a time; to memory, several rows at a time.
void Sweep::distribute(const TableSweep& table, const std::deque<Piece>& reading, size_t pieces,
                       std::vector<Output>& outputs) {
  const cache::Geometry& g = table.geometry;
  const bool dense = g.shard_count == 1 && u64{g.rows_per_page} * g.row_bytes == g.page_bytes;
  // Calls f(address) for each row that the output wants.
  auto each_row = [&](Output& output, auto f) {
    for (size_t i = 0; i < pieces; ++i) {
      const Piece& piece = reading[i];
      const u64 first_row = piece.first * g.rows_per_page, end_row = std::min(g.row_count, piece.end * g.rows_per_page);
      for (; output.next.row() < end_row; output.next.advance()) {
        const u64 row = output.next.row();
        f(dense ? piece.memory + (row - first_row) * g.row_bytes
                : piece.page(g, g.page_of(static_cast<i64>(row))) + g.offset_in_page(static_cast<i64>(row)));
      }
    }
  };
  workers_.parallel_for(outputs.size(), 1, [&](size_t begin, size_t end, u32) {
    for (size_t o = begin; o < end; ++o)
      if (!outputs[o].target.memory)
        each_row(outputs[o], [&](const std::byte* at) { outputs[o].append(at, g.row_bytes, writer_.get()); });
  });
  for (Output& output : outputs) {
    if (!output.target.memory) continue;
    found_.clear();
    each_row(output, [&](const std::byte* at) { found_.push_back(at); });
    std::byte* const to = output.target.memory + output.written;
    workers_.parallel_for(found_.size(), div_ceil(copy_bytes, g.row_bytes), [&](size_t begin, size_t end, u32) {
      for (size_t i = begin; i < end; ++i) std::memcpy(to + i * g.row_bytes, found_[i], g.row_bytes);
    });
    output.written += found_.size() * g.row_bytes;
  }
}

// --- reading a pack ---

class PackRead::Reads final : public io::Batch {
 public:
  explicit Reads(std::shared_ptr<Priority> priority) : priority_(std::move(priority)), begun_ns_(io::now_ns()) {}

  void done(const io::Read& read, const std::byte*, int error) noexcept override {
    if (error) {
      std::lock_guard lock(mutex_);
      bad_.push_back({read.cookie, read.cookie + read.bytes, error});
    }
    if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      busy_ns_.store(io::now_ns() - begun_ns_, std::memory_order_relaxed);
      priority_->end_urgent();
    }
  }
  void begin() {
    bad_.reserve(reads.size());  // done() cannot allocate
    left_.store(reads.size(), std::memory_order_relaxed);
    if (!reads.empty()) priority_->begin_urgent();
  }
  std::vector<Bad> bad() const {
    std::lock_guard lock(mutex_);
    return bad_;
  }
  u64 busy_ns() const { return busy_ns_.load(std::memory_order_relaxed); }

 private:
  std::shared_ptr<Priority> priority_;
  const u64 begun_ns_;
  std::atomic<u64> left_{0}, busy_ns_{0};
  mutable std::mutex mutex_;
  std::vector<Bad> bad_;
};

PackRead::PackRead(std::shared_ptr<io::Engine> engine, std::shared_ptr<Priority> priority, u32 file, u64 offset,
                   std::byte* to, u64 bytes, Stripes stripes)
    : engine_(std::move(engine)), reads_(std::make_shared<Reads>(priority)) {
  for (u64 at = 0; at < bytes;) {
    const Stripes::Place place = stripes.at(offset + at);
    const u64 most = std::min<u64>(place.room, engine_->max_read_bytes());
    const u32 n = static_cast<u32>(std::min(bytes - at, most));
    reads_->reads.push_back({place.offset, to + at, n, file + place.file, at});
    at += n;
  }
  reads_->begin();
  try {
    engine_->submit(reads_);
  } catch (...) {
    if (!reads_->reads.empty()) priority->end_urgent();
    throw;
  }
}

PackRead::~PackRead() {
  engine_->cancel(*reads_);
  reads_->wait();
}

bool PackRead::wait_for(u32 timeout_ms) { return reads_->wait_for(timeout_ms); }
std::vector<PackRead::Bad> PackRead::bad() const { return reads_->bad(); }
u64 PackRead::busy_ns() const { return reads_->busy_ns(); }

}  // namespace gids::packs
