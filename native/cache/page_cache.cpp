#include "cache/page_cache.h"

#include <algorithm>
#include <cerrno>
#include <stdexcept>

#include "cache/copy.h"
#include "store/crc32c.h"

namespace gids::cache {

namespace {
constexpr size_t block_rows = 64;          // rows whose words are loaded before the first is copied
constexpr size_t piece_bytes = 512 << 10;  // a worker's share at a time
}  // namespace

// The reads of one step (or of one read past the cache): pages into lines, and pages without a line into
// rows of the output. Of a page without a line only the rows are read that are wanted, and those between them, where
// that is half of the page at most and no neighbour of it is read: one long request costs less than two short ones.
// A page whose checksum is compared is read whole.
class PageCache::Fill final : public io::Batch {
 public:
  // One page read for rows of the output: `count` positions from `first`; `bytes` of it, after those skipped.
  struct Target {
    u64 page;
    u32 first, count, skipped, bytes;
  };
  enum class Row : u8 { not_mine, pending, delivered };

  Fill(PageCache& cache, std::span<const i64> ids, std::byte* out) : cache_(cache), ids_(ids), out_(out) {}

  void add_load(u64 page, u32 line) {
    const u32 bytes = cache_.geometry_.page_bytes;
    loads_.push_back({page, line});
    add_read(page, 0, bytes, cache_.lines_->data() + size_t{line} * bytes, loads_.size() - 1);
  }

  // Groups the positions by page, so that each page is read once.
  void add_rows(std::vector<u32> positions) {
    const Geometry& g = cache_.geometry_;
    positions_ = std::move(positions);
    std::sort(positions_.begin(), positions_.end(), [&](u32 a, u32 b) {
      const u64 pa = g.page_of(ids_[a]), pb = g.page_of(ids_[b]);
      return pa != pb ? pa < pb : ids_[a] < ids_[b];
    });
    for (u32 i = 0; i < positions_.size();) {
      const u64 page = g.page_of(ids_[positions_[i]]);
      u32 end = i + 1;
      while (end < positions_.size() && g.page_of(ids_[positions_[end]]) == page) ++end;
      targets_.push_back({page, i, end - i, 0, g.page_bytes});
      i = end;
    }
    rows_.assign(ids_.size(), Row::not_mine);
    for (const u32 position : positions_) rows_[position] = Row::pending;
    if (cache_.checksums_.empty()) skip_what_nobody_wants();
    // A row that is a whole page, wanted once and as it is, is read where it belongs; the engine sees to alignment.
    const bool whole = g.row_bytes == g.page_bytes && cache_.form_.as_stored();
    for (size_t i = 0; i < targets_.size(); ++i) {
      const Target& t = targets_[i];
      std::byte* dest = whole && t.count == 1 ? row(positions_[t.first]) : nullptr;
      add_read(t.page, t.skipped, t.bytes, dest, loads_.size() + i);
    }
  }

  void done(const io::Read& read, const std::byte* data, int error) noexcept override {
    const bool load = read.cookie < loads_.size();
    const u64 page = load ? loads_[read.cookie].page : targets_[read.cookie - loads_.size()].page;
    if (!error && !cache_.checksums_.empty() &&
        store::crc32c(data, cache_.geometry_.page_bytes) != cache_.checksums_[page])
      error = EBADMSG;
    if (load) {
      if (!error) word::publish(cache_.planner_.word(page));
      else cache_.planner_.reclaim(page, loads_[read.cookie].line);
    } else if (!error) {
      deliver(targets_[read.cookie - loads_.size()], data);
    }
    if (error) {
      std::lock_guard lock(failures_mutex_);
      failures_.push_back({read.file, cache_.geometry_.offset_of(page), error});
    }
  }

  // Whose a row of the output is: this batch writes those that it was given, and nobody else may before it ends.
  Row row_state(size_t position) const {
    if (rows_.empty()) return Row::not_mine;
    return std::atomic_ref<Row>(const_cast<Row&>(rows_[position])).load(std::memory_order_acquire);
  }
  std::vector<Failure>& failures() { return failures_; }

 private:
  struct Destination {
    u64 page;
    u32 line;
  };

  std::byte* row(u32 position) { return out_ + size_t{position} * cache_.form_.out_row_bytes(); }

  void add_read(u64 page, u32 skipped, u32 bytes, std::byte* dest, u64 cookie) {
    const Geometry& g = cache_.geometry_;
    reads.push_back({g.offset_of(page) + skipped, dest, bytes, g.file_of(page), cookie});
  }

  void skip_what_nobody_wants() {
    const Geometry& g = cache_.geometry_;
    size_t next = 0;  // the first target that does not lie before this one's neighbour
    std::vector<bool> neighbours(targets_.size());
    for (size_t i = 0; i < targets_.size(); ++i) {
      while (next < targets_.size() && targets_[next].page < targets_[i].page + g.shard_count) ++next;
      if (next < targets_.size() && targets_[next].page == targets_[i].page + g.shard_count)
        neighbours[i] = neighbours[next] = true;
    }
    for (size_t i = 0; i < targets_.size(); ++i) {
      Target& t = targets_[i];
      const u32 begin = g.offset_in_page(ids_[positions_[t.first]]);
      const u32 end = g.offset_in_page(ids_[positions_[t.first + t.count - 1]]) + g.row_bytes;
      if (neighbours[i] || end - begin > g.page_bytes / 2) continue;
      t.skipped = begin;
      t.bytes = end - begin;
    }
  }

  void deliver(const Target& t, const std::byte* data) noexcept {
    const Geometry& g = cache_.geometry_;
    for (u32 i = t.first; i < t.first + t.count; ++i) {
      const u32 position = positions_[i];
      const std::byte* from = data + g.offset_in_page(ids_[position]) - t.skipped;
      std::byte* to = row(position);
      if (from != to) convert_rows(cache_.form_, &from, &to, 1, false);
      std::atomic_ref<Row>(rows_[position]).store(Row::delivered, std::memory_order_release);
    }
  }

  PageCache& cache_;
  std::span<const i64> ids_;
  std::byte* out_;
  std::vector<Destination> loads_;
  std::vector<Target> targets_;
  std::vector<u32> positions_;
  std::vector<Row> rows_;
  std::mutex failures_mutex_;
  std::vector<Failure> failures_;
};

struct PageCache::Flight {
  u64 step;
  std::span<const i64> ids;
  std::byte* out;
  std::shared_ptr<Fill> fill;
  std::vector<u32> left;  // positions that gather_ready could not copy
  bool gathered = false;
};

PageCache::PageCache(std::shared_ptr<io::Engine> engine, std::shared_ptr<Workers> workers, const Geometry& geometry,
                     const CacheOptions& options)
    : engine_(std::move(engine)),
      workers_(std::move(workers)),
      geometry_((geometry.validate(), geometry)),
      planner_(geometry.page_count(), options.lines, options.policy, options.seed, options.heat),
      lines_(std::make_shared<HugeArray<std::byte>>(size_t{options.lines} * geometry.page_bytes)),
      checksums_(options.checksums),
      form_(options.form) {
  form_.row_bytes = geometry_.row_bytes;
  form_.validate();
  if (!checksums_.empty() && checksums_.size() != geometry_.page_count())
    throw std::invalid_argument("checksums: one per page");
  if (geometry_.page_bytes > engine_->max_read_bytes())
    throw std::invalid_argument("pages of " + std::to_string(geometry_.page_bytes) +
                                " B; the engine was opened for reads of " +
                                std::to_string(engine_->max_read_bytes()) + " B at most (max_read_bytes)");
  if (u64{geometry_.first_file} + geometry_.shard_count > engine_->file_count())
    throw std::invalid_argument("shards in the files from " + std::to_string(geometry_.first_file) + " to " +
                                std::to_string(u64{geometry_.first_file} + geometry_.shard_count - 1) +
                                "; the engine has " + std::to_string(engine_->file_count()));
  if (geometry_.page_count() / geometry_.shard_count >= io::kOffsetMax / geometry_.page_bytes)
    throw std::invalid_argument("a table of more bytes than any file holds");
  if (lines_->size()) engine_->register_memory(lines_->data(), lines_->bytes(), lines_);
}

PageCache::~PageCache() { cancel(); }

PageCache::Flight& PageCache::flight(u64 step) {
  for (Flight& f : flights_)
    if (f.step == step) return f;
  throw std::logic_error("step " + std::to_string(step) + " is not planned");
}

void PageCache::enter(u64 step, std::span<const i64> ids) {
  planner_.enter(step, ids, geometry_.row_count, geometry_.rows_per_page);
}

void PageCache::plan(u64 step, std::span<const i64> ids, std::byte* out) {
  std::unique_lock lock(plan_mutex_);
  const Step& s = planner_.plan(step);
  lock.unlock();
  try {
    submit(s, ids, out);
  } catch (...) {  // the engine is closed, or memory is short: no read will end these loads
    for (const Load& l : s.loads) planner_.reclaim(s.pages[l.index], l.line);
    if (!flights_.empty() && flights_.back().step == step) flights_.pop_back();
    throw;
  }
}

void PageCache::submit(const Step& s, std::span<const i64> ids, std::byte* out) {
  auto fill = std::make_shared<Fill>(*this, ids, out);
  for (const Load& l : s.loads) fill->add_load(s.pages[l.index], l.line);
  if (!s.bypassed.empty()) {
    std::vector<u32> positions;
    if (s.pages.size() == ids.size()) {  // one id a page: the page's index is the id's position
      positions = s.bypassed;
    } else {
      for (size_t i = 0; i < ids.size(); ++i)
        if (word::state_of(word::load(planner_.word(geometry_.page_of(ids[i])))) == PageState::absent)
          positions.push_back(static_cast<u32>(i));
    }
    fill->add_rows(std::move(positions));
  }
  flights_.push_back({s.number, ids, out, fill, {}, false});
  engine_->submit(std::move(fill));
}

// Copies rows whose words say RESIDENT; the positions of the others go to `left`. positions: which to look
// at; empty means all. fill: rows that it has delivered are done, and those that it may still write are left,
// though a later step may have brought their pages into lines meanwhile.
void PageCache::copy_resident(std::span<const i64> ids, std::byte* out, const Fill* fill,
                              std::span<const u32> positions, std::vector<u32>& left) {
  const size_t n = positions.empty() ? ids.size() : positions.size();
  const size_t row_bytes = form_.out_row_bytes();
  const bool streaming = ids.size() * row_bytes >= streaming_bytes;
  const bool being_filled = fill && !fill->finished();
  std::vector<std::vector<u32>> left_by_worker(workers_->threads());
  const size_t grain = std::max(block_rows, piece_bytes / row_bytes);
  workers_->parallel_for(n, grain, [&](size_t begin, size_t end, u32 worker) {
    std::vector<u32>& mine = left_by_worker[worker];
    const std::byte* from[block_rows];
    std::byte* to[block_rows];
    auto position_of = [&](size_t k) { return positions.empty() ? static_cast<u32>(k) : positions[k]; };
    for (size_t k0 = begin; k0 < end; k0 += block_rows) {
      const size_t k1 = std::min(end, k0 + block_rows);
      for (size_t k = k0; k < k1; ++k) __builtin_prefetch(&planner_.word(geometry_.page_of(ids[position_of(k)])));
      size_t found = 0;
      for (size_t k = k0; k < k1; ++k) {
        const u32 i = position_of(k);
        const Fill::Row state = fill ? fill->row_state(i) : Fill::Row::not_mine;
        if (state == Fill::Row::delivered) continue;
        const u64 w = word::load(planner_.word(geometry_.page_of(ids[i])));
        const bool mine_to_write = state == Fill::Row::not_mine || !being_filled;
        if (mine_to_write && word::state_of(w) == PageState::resident) {
          from[found] = row_in_line(w, ids[i]);
          to[found++] = out + i * row_bytes;
        } else {
          mine.push_back(i);
        }
      }
      convert_rows(form_, from, to, found, streaming);
    }
  });
  left.clear();
  for (const auto& l : left_by_worker) left.insert(left.end(), l.begin(), l.end());
}

void PageCache::gather_ready(u64 step) {
  Flight& f = flight(step);
  copy_resident(f.ids, f.out, f.fill.get(), {}, f.left);
  f.gathered = true;
}

bool PageCache::wait_for(u64 step, u32 timeout_ms) { return flight(step).fill->wait_for(timeout_ms); }

std::vector<Failure> PageCache::gather_rest(u64 step, const std::function<void()>& check) {
  Flight& f = flight(step);
  if (!f.gathered || !f.fill->finished()) throw std::logic_error("gather_rest before gather_ready and wait_for");
  std::vector<u32> left = std::move(f.left);
  if (!left.empty()) {
    std::vector<u32> missing;
    copy_resident(f.ids, f.out, f.fill.get(), left, missing);
    left = std::move(missing);
  }
  return read_past_cache(f.ids, f.out, std::move(left), check);
}

std::vector<Failure> PageCache::read_past_cache(std::span<const i64> ids, std::byte* out,
                                                std::vector<u32> positions,
                                                const std::function<void()>& check) {
  if (positions.empty()) return {};
  auto fill = std::make_shared<Fill>(*this, ids, out);
  fill->add_rows(std::move(positions));
  engine_->submit(fill);
  engine_->wait(*fill, check);
  return std::move(fill->failures());
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
  std::vector<u32> left;
  {
    std::lock_guard lock(plan_mutex_);  // no line changes hands while it is copied without a mark
    copy_resident(ids, out, nullptr, {}, left);
  }
  return read_past_cache(ids, out, std::move(left), check);
}

}  // namespace gids::cache
