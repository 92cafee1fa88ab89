#include "cache/page_cache.h"

#include <algorithm>
#include <cerrno>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "cache/copy.h"
#include "store/crc32c.h"
#include "store/mapped_file.h"

namespace gids::cache {

namespace {

constexpr size_t block_rows = 64;          // rows whose words are loaded before the first is copied
constexpr size_t piece_bytes = 512 << 10;  // a worker's share at a time

// Batches that are being read, oldest first. Those left at the end are cancelled and waited for: they write into
// memory that is then gone.
class ReadsInFlight {
 public:
  explicit ReadsInFlight(io::Engine& engine) : engine_(engine) {}
  ~ReadsInFlight() {
    for (const auto& batch : batches_) {
      engine_.cancel(*batch);
      batch->wait();
    }
  }
  void add(std::shared_ptr<io::Batch> batch) {
    engine_.submit(batch);
    batches_.push_back(std::move(batch));
  }
  size_t count() const { return batches_.size(); }
  io::Batch& oldest() { return *batches_.front(); }
  std::shared_ptr<io::Batch> take_oldest() {
    auto batch = std::move(batches_.front());
    batches_.pop_front();
    return batch;
  }

 private:
  io::Engine& engine_;
  std::deque<std::shared_ptr<io::Batch>> batches_;
};

}  // namespace

// The reads of one step (or of one read past the cache): pages into lines, and pages without a line into
// rows of the output. If a page without a line has no neighbor that is read, and its wanted rows, with those between
// them, are at most half of the page, only these rows are read. Otherwise it is read whole, as one long request costs
// less than two short ones; so is a page whose checksum is compared.
class PageCache::Fill final : public io::Batch {
 public:
  enum class Row : u8 { not_mine, pending, delivered };

  Fill(PageCache& cache, std::span<const i64> ids, std::byte* out) : cache_(cache), ids_(ids), out_(out) {}

  void add_loads(const Planner& planner, const PageList& pages) {
    const u32 bytes = cache_.geometry_.page_bytes;
    reads.reserve(planner.loads().size() + (out_ ? planner.bypassed().size() : 0));
    for (const Load& l : planner.loads())
      add_read(pages[l.index], 0, bytes, cache_.lines_->data() + size_t{l.line} * bytes, is_load | l.line);
  }

  // Groups the positions by page, so that each page is read once.
  void add_rows(std::vector<u32> positions) {
    const Geometry& g = cache_.geometry_;
    positions_ = std::move(positions);
    auto before = [&](u32 a, u32 b) {
      const u64 pa = g.page_of(ids_[a]), pb = g.page_of(ids_[b]);
      return pa != pb ? pa < pb : ids_[a] < ids_[b];
    };
    if (!std::is_sorted(positions_.begin(), positions_.end(), before))
      std::sort(positions_.begin(), positions_.end(), before);
    const u32 n = static_cast<u32>(positions_.size());
    auto starts_page = [&](u32 i) { return i == 0 || page_of(i) != page_of(i - 1); };
    size_t pages = 0;
    for (u32 i = 0; i < n; ++i) pages += starts_page(i);
    firsts_.reserve(pages + 1);
    for (u32 i = 0; i < n; ++i)
      if (starts_page(i)) firsts_.push_back(i);
    firsts_.push_back(n);
    rows_.assign(ids_.size(), Row::not_mine);
    for (const u32 position : positions_) rows_[position] = Row::pending;
    add_page_reads();
  }

  void done(const io::Read& read, const std::byte* data, int error) noexcept override {
    const Geometry& g = cache_.geometry_;
    const u64 page = g.page_at(read.file, read.offset);
    if (!error && !cache_.checksums_.empty() &&
        store::crc32c(data, g.page_bytes) != store::value_at(&cache_.checksums_[page]))
      error = EBADMSG;
    if (read.cookie & is_load) {
      if (!error) word::publish(cache_.planner_.word(page));
      else cache_.planner_.reclaim(page, static_cast<u32>(read.cookie), error != ECANCELED);
    } else if (!error) {
      deliver(static_cast<u32>(read.cookie), data - (read.offset - g.offset_of(page)));
    }
    if (error) {
      std::lock_guard lock(failures_mutex_);
      failures_.push_back({read.file, g.offset_of(page), error});
    }
  }

  // Claims rows of the output: only this batch may write them until it ends.
  Row row_state(size_t position) const {
    if (rows_.empty()) return Row::not_mine;
    return std::atomic_ref<Row>(const_cast<Row&>(rows_[position])).load(std::memory_order_acquire);
  }
  std::vector<Failure>& failures() { return failures_; }
  bool overflowed() const { return overflowed_.load(std::memory_order_relaxed); }
  size_t bytes() const {
    return reads.capacity() * sizeof(io::Read) + (firsts_.capacity() + positions_.capacity()) * sizeof(u32) +
           rows_.capacity();
  }

 private:
  static constexpr u64 is_load = u64{1} << 32;  // in a read's cookie, with the line; else it says which page of firsts_

  std::byte* row(u32 position) { return out_ + size_t{position} * cache_.form_.out_row_bytes(); }
  u64 page_of(u32 i) const { return cache_.geometry_.page_of(ids_[positions_[i]]); }

  void add_read(u64 page, u32 skipped, u32 bytes, std::byte* dest, u64 cookie) {
    const Geometry& g = cache_.geometry_;
    reads.push_back({g.offset_of(page) + skipped, dest, bytes, g.file_of(page), cookie});
  }

  // A read for each page of firsts_, of the rows that are wanted and those between.
  void add_page_reads() {
    const Geometry& g = cache_.geometry_;
    const size_t pages = firsts_.size() - 1;
    std::vector<bool> neighbors(cache_.checksums_.empty() ? pages : 0);
    size_t next = 0;  // the first page that does not lie before this one's neighbor
    for (size_t i = 0; i < neighbors.size(); ++i) {
      const u64 neighbor = page_of(firsts_[i]) + g.shard_count;
      while (next < pages && page_of(firsts_[next]) < neighbor) ++next;
      if (next < pages && page_of(firsts_[next]) == neighbor) neighbors[i] = neighbors[next] = true;
    }
    // A row that is a whole page, wanted once and as it is, is read where it belongs; the engine sees to alignment.
    const bool whole = g.row_bytes == g.page_bytes && cache_.form_.as_stored();
    reads.reserve(reads.size() + pages);
    for (size_t i = 0; i < pages; ++i) {
      const u32 first = firsts_[i], last = firsts_[i + 1] - 1;
      const u32 begin = g.offset_in_page(ids_[positions_[first]]);
      const u32 end = g.offset_in_page(ids_[positions_[last]]) + g.row_bytes;
      const bool part = !neighbors.empty() && !neighbors[i] && end - begin <= g.page_bytes / 2;
      std::byte* dest = whole && first == last ? row(positions_[first]) : nullptr;
      add_read(page_of(first), part ? begin : 0, part ? end - begin : g.page_bytes, dest, i);
    }
  }

  // page: where its first byte is or would be, of what was read of it.
  void deliver(u32 at, const std::byte* page) noexcept {
    const Geometry& g = cache_.geometry_;
    for (u32 i = firsts_[at]; i < firsts_[at + 1]; ++i) {
      const u32 position = positions_[i];
      const std::byte* from = page + g.offset_in_page(ids_[position]);
      std::byte* to = row(position);
      if (from != to && convert_rows(cache_.form_, &from, &to, 1, false))
        overflowed_.store(true, std::memory_order_relaxed);
      std::atomic_ref<Row>(rows_[position]).store(Row::delivered, std::memory_order_release);
    }
  }

  PageCache& cache_;
  std::span<const i64> ids_;
  std::byte* out_;
  std::vector<u32> positions_;  // of rows that are read past the lines, by page
  std::vector<u32> firsts_;     // where each page's positions begin, and their end
  std::vector<Row> rows_;       // by position; empty without such rows
  std::mutex failures_mutex_;
  std::vector<Failure> failures_;
  std::atomic<bool> overflowed_{false};
};

struct PageCache::Flight {
  u64 step;
  std::span<const i64> ids;
  std::byte* out;
  std::shared_ptr<Fill> fill;
  std::vector<u32> left;  // positions that gather_ready could not copy
  bool gathered = false;
  bool overflowed = false;
};

PageCache::PageCache(std::shared_ptr<io::Engine> engine, std::shared_ptr<Workers> workers, const Geometry& geometry,
                     const CacheOptions& options)
    : engine_(std::move(engine)),
      workers_(std::move(workers)),
      geometry_((geometry.validate(), geometry)),
      planner_(geometry.page_count(), options.lines, options.policy, options.seed, options.heat, options.keep),
      lines_(std::make_shared<HugeArray<std::byte>>(size_t{options.lines} * geometry.page_bytes)),
      checksums_(options.checksums),
      form_(options.form) {
  form_.row_bytes = geometry_.row_bytes;
  form_.validate();
  if (!checksums_.empty() && checksums_.size() != geometry_.page_count())
    throw std::invalid_argument("checksums must have one value per page");
  if (geometry_.page_bytes > engine_->max_read_bytes())
    throw std::invalid_argument("pages of " + std::to_string(geometry_.page_bytes) +
                                " B; the engine was opened for reads of " + std::to_string(engine_->max_read_bytes()) +
                                " B at most (max_read_bytes)");
  if (u64{geometry_.first_file} + geometry_.shard_count > engine_->file_count())
    throw std::invalid_argument("shards in the files from " + std::to_string(geometry_.first_file) + " to " +
                                std::to_string(u64{geometry_.first_file} + geometry_.shard_count - 1) +
                                "; the engine has " + std::to_string(engine_->file_count()));
  if (geometry_.page_count() / geometry_.shard_count >= io::offset_max / geometry_.page_bytes)
    throw std::invalid_argument("the table has more bytes than any file can hold");
}

PageCache::~PageCache() {
  cancel();
  if (registered_) engine_->forget_memory(lines_->data(), lines_->bytes());
}

PageCache::Flight& PageCache::flight(u64 step) {
  for (Flight& f : flights_)
    if (f.step == step) return f;
  throw std::logic_error("step " + std::to_string(step) + " is not planned");
}

void PageCache::enter(u64 step, std::span<const i64> ids) {
  planner_.enter(step, ids, geometry_.row_count, geometry_.rows_per_page);
}

size_t PageCache::plan_bytes() const {
  size_t sum = planner_.plan_bytes();
  for (const Flight& f : flights_) sum += f.fill->bytes() + f.left.capacity() * sizeof(u32);
  return sum;
}

void PageCache::plan(u64 step, std::span<const i64> ids, std::byte* out) {
  std::unique_lock lock(plan_mutex_);
  const Step& s = planner_.plan(step);
  const bool all_used = planner_.all_lines_used();
  lock.unlock();
  try {
    // Not before: it makes all lines resident, for which the first minibatch would wait up to a second per GB.
    if (all_used && !std::exchange(registered_, true))
      engine_->register_memory(lines_->data(), lines_->bytes(), lines_);
    submit(s, ids, out);
  } catch (...) {  // the engine is closed, or memory is short: no read will end these loads
    for (const Load& l : planner_.loads()) planner_.reclaim(s.pages[l.index], l.line, false);
    if (!flights_.empty() && flights_.back().step == step) flights_.pop_back();
    throw;
  }
}

void PageCache::submit(const Step& s, std::span<const i64> ids, std::byte* out) {
  auto fill = std::make_shared<Fill>(*this, ids, out);
  fill->add_loads(planner_, s.pages);
  const std::span<const u32> bypassed = planner_.bypassed();
  if (!bypassed.empty()) {
    std::vector<u32> positions;
    if (s.pages.size() == ids.size()) {  // one id a page: the page's index is the id's position
      positions.assign(bypassed.begin(), bypassed.end());
    } else {
      for (size_t i = 0; i < ids.size(); ++i)
        if (word::state_of(word::load(planner_.word(geometry_.page_of(ids[i])))) == PageState::absent)
          positions.push_back(static_cast<u32>(i));
      positions.shrink_to_fit();
    }
    fill->add_rows(std::move(positions));
  }
  flights_.push_back({s.number, ids, out, fill, {}, false});
  engine_->submit(std::move(fill));
}

// Copies rows whose words are RESIDENT. fill: rows that it has delivered are done; rows that it may still write are
// left out, even if a later step has brought their pages into lines meanwhile.
bool PageCache::copy_resident(std::span<const i64> ids, std::byte* out, const Fill* fill, std::vector<u32>& positions) {
  const size_t n = positions.size();
  const size_t row_bytes = form_.out_row_bytes();
  const bool streaming = ids.size() * row_bytes >= streaming_bytes;
  const bool being_filled = fill && !fill->finished();
  const size_t grain = std::max(block_rows, piece_bytes / row_bytes);
  struct Piece {
    size_t begin, end;
  };
  std::vector<Piece> left(div_ceil(n, grain));  // what stays of each piece, where it was
  std::atomic<bool> overflowed{false};
  workers_->parallel_for(n, grain, [&](size_t begin, size_t end, u32) {
    size_t kept = begin;
    const std::byte* from[block_rows];
    std::byte* to[block_rows];
    for (size_t k0 = begin; k0 < end; k0 += block_rows) {
      const size_t k1 = std::min(end, k0 + block_rows);
      for (size_t k = k0; k < k1; ++k) __builtin_prefetch(&planner_.word(geometry_.page_of(ids[positions[k]])));
      size_t found = 0;
      for (size_t k = k0; k < k1; ++k) {
        const u32 i = positions[k];
        const Fill::Row state = fill ? fill->row_state(i) : Fill::Row::not_mine;
        if (state == Fill::Row::delivered) continue;
        const u64 w = word::load(planner_.word(geometry_.page_of(ids[i])));
        const bool mine_to_write = state == Fill::Row::not_mine || !being_filled;
        if (mine_to_write && word::state_of(w) == PageState::resident) {
          from[found] = row_in_line(w, ids[i]);
          to[found++] = out + i * row_bytes;
        } else {
          positions[kept++] = i;
        }
      }
      if (convert_rows(form_, from, to, found, streaming)) overflowed.store(true, std::memory_order_relaxed);
    }
    left[begin / grain] = {begin, kept};
  });
  size_t kept = 0;
  for (const Piece& p : left)
    for (size_t k = p.begin; k < p.end; ++k) positions[kept++] = positions[k];
  positions.resize(kept);
  return overflowed.load(std::memory_order_relaxed);
}

void PageCache::gather_ready(u64 step) {
  Flight& f = flight(step);
  f.left.resize(f.ids.size());
  std::iota(f.left.begin(), f.left.end(), 0u);
  f.overflowed |= copy_resident(f.ids, f.out, f.fill.get(), f.left);
  f.gathered = true;
}

bool PageCache::wait_for(u64 step, u32 timeout_ms) { return flight(step).fill->wait_for(timeout_ms); }

std::vector<Failure> PageCache::gather_rest(u64 step, const std::function<void()>& check) {
  Flight& f = flight(step);
  if (!f.gathered || !f.fill->finished()) throw std::logic_error("gather_rest before gather_ready and wait_for");
  std::vector<u32> left = std::move(f.left);
  f.overflowed |= copy_resident(f.ids, f.out, f.fill.get(), left) || f.fill->overflowed();
  return read_past_cache(f.ids, f.out, std::move(left), f.overflowed, check);
}

std::vector<Failure> PageCache::read_past_cache(std::span<const i64> ids, std::byte* out, std::vector<u32> positions,
                                                bool overflowed, const std::function<void()>& check) {
  if (positions.size() > part_rows)  // a page's rows come together
    std::sort(positions.begin(), positions.end(), [&](u32 a, u32 b) { return ids[a] < ids[b]; });
  std::vector<Failure> failures;
  ReadsInFlight reads(*engine_);
  auto finish_one = [&] {
    engine_->wait(reads.oldest(), check);
    const auto fill = std::static_pointer_cast<Fill>(reads.take_oldest());
    overflowed |= fill->overflowed();
    failures.insert(failures.end(), fill->failures().begin(), fill->failures().end());
  };
  for (size_t begin = 0; begin < positions.size();) {
    size_t end = std::min(positions.size(), begin + part_rows);
    const auto page = [&](size_t k) { return geometry_.page_of(ids[positions[k]]); };
    while (end < positions.size() && page(end) == page(end - 1)) ++end;
    auto fill = std::make_shared<Fill>(*this, ids, out);
    fill->add_rows({positions.begin() + static_cast<std::ptrdiff_t>(begin),
                    positions.begin() + static_cast<std::ptrdiff_t>(end)});
    reads.add(std::move(fill));
    if (reads.count() == parts_at_once) {
      check();  // a part may be read in less than the tenth of a second after which the engine checks
      finish_one();
    }
    begin = end;
  }
  while (reads.count()) finish_one();
  if (overflowed) failures.push_back({geometry_.first_file, 0, ERANGE});
  return failures;
}

void PageCache::retire(u64 step) {
  if (!flights_.empty() && flights_.front().step == step) {
    flights_.front().fill->wait();
    flights_.pop_front();
  }
  planner_.retire(step);
}

u64 PageCache::cancel() {
  for (Flight& f : flights_) engine_->cancel(*f.fill);  // what is not issued yet need not be read
  while (planner_.first_live() < planner_.entered()) retire(planner_.first_live());
  return planner_.entered();
}

std::vector<Failure> PageCache::read_through(std::span<const i64> ids, std::byte* out,
                                             const std::function<void()>& check) {
  Planner::check(ids, geometry_.row_count);
  std::vector<u32> left(ids.size());
  std::iota(left.begin(), left.end(), 0u);
  bool overflowed;
  {
    std::lock_guard lock(plan_mutex_);  // no line changes hands while it is copied without a mark
    overflowed = copy_resident(ids, out, nullptr, left);
  }
  return read_past_cache(ids, out, std::move(left), overflowed, check);
}

}  // namespace gids::cache
