#include "cache/planner.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "gids/mix.h"

namespace gids::cache {

namespace {

// How many items ahead a word is fetched: random access to the page table is a cache miss each.
constexpr size_t ahead = 32;
// Lines are relinked in groups: first fetch the nodes, then their neighbors, then link.
constexpr size_t group = 64;
// Tries for a random victim, as in the published cache; then the page goes without a line.
constexpr int victim_tries = 64;
// Added to the state of the random numbers: SplitMix64.
constexpr u64 golden = 0x9E3779B97F4A7C15ull;

void prefetch(const u64& w) { __builtin_prefetch(&w, 1, 3); }

}  // namespace

Planner::Planner(u64 pages, u32 lines, Policy policy, u64 seed, std::span<const u8> heat, bool keep)
    : policy_(policy),
      keep_(keep || policy == Policy::pinned),
      words_(pages),
      line_count_(lines),
      lists_(lines, buckets),
      random_state_(seed) {
  if (lines > word::line_mask) throw std::invalid_argument("a table can have at most 2^30 - 1 lines");
  if (pages > BucketLists::max_pages) throw std::invalid_argument("a table can have at most 2^34 pages");
  if (!heat.empty() && heat.size() != pages) throw std::invalid_argument("heat must have one byte per page");
  for (u64 p = 0; p < heat.size(); ++p) words_[p] = word::fresh(heat[p]);
  if (policy == Policy::pinned && !heat.empty()) pin(static_cast<u64>(pinned_share * lines));
}

// Marks the `count` hottest pages as kept, and no others; of equally hot ones the first.
void Planner::pin(u64 count) {
  std::array<u64, word::heat_levels> pages{};
  for (u64 p = 0; p < words_.size(); ++p) ++pages[word::heat_of(words_[p])];
  u32 least = word::heat_levels;  // pages at least as hot fit
  u64 left = count;
  while (least > 0 && pages[least - 1] <= left) left -= pages[--least];
  for (u64 p = 0; p < words_.size(); ++p) {
    const u32 heat = word::heat_of(words_[p]);
    bool hot = heat >= least;
    if (heat + 1 == least && left > 0) {
      hot = true;
      --left;
    }
    words_[p] = word::fresh(hot ? word::heat_levels - 1 : 0);
  }
}

Step& Planner::step(u64 number) {
  if (number < retired_ || number >= entered_)
    throw std::logic_error("step " + std::to_string(number) + " is not live (live: " + std::to_string(retired_) +
                           " <= step < " + std::to_string(entered_) + ")");
  return *live_[number - retired_];
}

size_t Planner::step_bytes() const {
  size_t sum = 0;
  for (const auto& s : live_) sum += s->pages.bytes();
  for (const auto& s : recycled_) sum += s->pages.bytes();
  return sum;
}

size_t Planner::plan_bytes() const {
  return narrow_pages_.capacity() * sizeof(u32) + wide_pages_.capacity() * sizeof(u64) +
         loads_.capacity() * sizeof(Load) + spare_.capacity() * sizeof(u32) + miss_index_.capacity() * sizeof(u32) +
         miss_worth_.capacity() * sizeof(u16);
}

void Planner::check(std::span<const i64> ids, u64 row_count) {
  u64 highest = 0;  // a negative id is a huge unsigned one
  for (i64 id : ids) highest = std::max(highest, static_cast<u64>(id));
  if (highest >= row_count && !ids.empty()) {
    const auto bad = std::find_if(ids.begin(), ids.end(), [&](i64 id) { return static_cast<u64>(id) >= row_count; });
    throw std::out_of_range("id " + std::to_string(*bad) + " at position " + std::to_string(bad - ids.begin()) +
                            " is out of range for a table of " + std::to_string(row_count) + " rows");
  }
}

Step& Planner::enter(u64 number, std::span<const i64> ids, u64 row_count, u32 rows_per_page) {
  if (live_.empty() && number > entered_) entered_ = planned_ = retired_ = number;
  if (number != entered_) throw std::logic_error("steps must enter in order: expected " + std::to_string(entered_));
  if (entered_ - retired_ >= word::use_bits)
    throw std::logic_error("at most " + std::to_string(word::use_bits) + " steps may be live: retire one first");
  check(ids, row_count);

  if (recycled_.empty()) recycled_.push_back(std::make_unique<Step>());
  live_.push_back(std::move(recycled_.back()));
  recycled_.pop_back();
  ++entered_;
  Step& s = *live_.back();
  s.number = number;
  s.planned = false;
  s.hits = s.coalesced = 0;
  s.pages.clear();
  if (words_.size() <= u64{1} << 32) mark(s, ids, rows_per_page, narrow_pages_);
  else mark(s, ids, rows_per_page, wide_pages_);
  return s;
}

// scratch: the page of each id; then, in the same memory, the unique pages.
template <class Page>
void Planner::mark(Step& s, std::span<const i64> ids, u32 rows_per_page, std::vector<Page>& scratch) {
  const size_t n = ids.size();
  scratch.resize(n);
  Page* pages = scratch.data();
  if (rows_per_page > 1) {
    for (size_t i = 0; i < n; ++i) pages[i] = static_cast<Page>(static_cast<u64>(ids[i]) / rows_per_page);
  } else {
    for (size_t i = 0; i < n; ++i) pages[i] = static_cast<Page>(ids[i]);
  }
  const u32 bit = word::use_bit(s.number);
  size_t unique = 0;
  u32 lines[group], from[group];
  for (size_t begin = 0; begin < n; begin += group) {
    const size_t end = std::min(n, begin + group);
    size_t moved = 0;
    for (size_t i = begin; i < end; ++i) {
      if (i + ahead < n) prefetch(words_[pages[i + ahead]]);
      const Page page = pages[i];
      const u64 before = word::enter(words_[page], bit);
      pages[unique] = page;
      unique += !(before & bit);
      // A resident page without any use waits in its heat's list; now its next use is this step. One with
      // an earlier use stays where it is.
      if (by_use() && state_of(before) == PageState::resident && !uses_of(before) && !kept(before)) {
        lines[moved] = word::line_of(before);
        from[moved++] = word::heat_of(before);
        lists_.prefetch(word::line_of(before));
      }
    }
    for (size_t k = 0; k < moved; ++k) lists_.prefetch_neighbors(lines[k]);
    for (size_t k = 0; k < moved; ++k) {
      lists_.remove(lines[k], from[k]);
      lists_.push_back(lines[k], list_of_use(s.number, score::use_level(from[k])));
    }
  }
  s.pages.assign(std::span<const Page>(pages, unique));
}

u32 Planner::worth(u64 w) const {
  if (policy_ == Policy::lru) return 0;
  return score::worth(by_use() ? score::Policy::lookahead : score::Policy::fixed, w, planned_mask_, planned_);
}

// A missing page is worth more than any line under lru: recency beats all.
u32 Planner::miss_worth(u64 w) const {
  if (kept(w)) return buckets - 1;
  return policy_ == Policy::lru ? 1 : worth(w);
}

u32 Planner::list_of_worth(u32 bucket) const {
  if (bucket < word::heat_levels) return bucket;
  const u32 use = bucket - word::heat_levels;
  return list_of_use(planned_ + word::use_bits - 1 - use / use_levels, use % use_levels);
}

void Planner::look_up(Step& s) {
  const size_t n = s.pages.size();
  miss_index_.resize(n + 1);
  miss_worth_.resize(n + 1);
  size_t misses = 0;
  u64 coalesced = 0;
  s.pages.visit([&](auto pages) {
    for (size_t i = 0; i < n; ++i) {  // no branch on hit or miss: it cannot be predicted
      if (i + ahead < n) prefetch(words_[pages[i + ahead]]);
      const u64 w = word::load(words_[pages[i]]);
      miss_index_[misses] = static_cast<u32>(i);
      miss_worth_[misses] = static_cast<u16>(miss_worth(w));
      misses += state_of(w) == PageState::absent;
      coalesced += state_of(w) == PageState::loading;
    }
  });
  miss_index_.resize(misses);
  miss_worth_.resize(misses);
  misses_by_worth_.fill(0);
  for (u16 b : miss_worth_) ++misses_by_worth_[b];
  s.hits = n - misses;
  s.coalesced = coalesced;
}

u32 Planner::take_line() {
  if (spare_.empty()) return fresh_++;
  const u32 line = spare_.back();
  spare_.pop_back();
  return line;
}

void Planner::evict(u64 page, u32 line) {
  word::evict(words_[page], line);
  ++stats_.evictions;
}

Step& Planner::plan(u64 number) {
  Step& s = step(number);
  if (number != planned_)
    throw std::logic_error("steps must be planned in order: expected " + std::to_string(planned_));
  {
    std::lock_guard lock(failed_mutex_);
    spare_.insert(spare_.end(), failed_.begin(), failed_.end());
    failed_.clear();
    stats_.failures = failures_;
  }
  // Lines that this step hits leave their lists: from here on a planned minibatch needs them.
  const u32 bit = word::use_bit(number);
  if (by_use()) {
    for (u32 level = 0; level < use_levels; ++level) lists_.clear(list_of_use(number, level));
  } else if (by_lists()) {
    for (size_t i = 0; i < s.pages.size(); ++i) {
      if (i + ahead < s.pages.size()) prefetch(words_[s.pages[i + ahead]]);
      const u64 w = word::load(words_[s.pages[i]]);
      if (idle(w)) lists_.remove(word::line_of(w), worth(w));
    }
  }
  planned_mask_ |= bit;
  ++planned_;
  s.planned = true;

  look_up(s);
  if (by_lists()) plan_by_lists(s);
  else plan_by_chance(s);

  ++stats_.steps;
  stats_.pages += s.pages.size();
  stats_.hits += s.hits;
  stats_.coalesced += s.coalesced;
  stats_.loads += loads_.size();
  stats_.bypasses += miss_index_.size();
  return s;
}

void Planner::plan_by_lists(Step& s) {
  const u32 misses = static_cast<u32>(miss_index_.size());
  score::Cut c{};
  if (misses > free_lines()) {
    Histogram lines{};
    for (u32 b = 0; b < buckets; ++b) lines[b] = lists_.count(list_of_worth(b));
    c = score::cut(lines.data(), misses_by_worth_.data(), misses - free_lines());
    for (u32 b = 0; b < c.bucket; ++b) drop(list_of_worth(b), lines[b]);
    drop(list_of_worth(c.bucket), c.lines);
  }
  loads_.clear();
  loads_.reserve(std::min(misses, free_lines()));
  u32 bypassed = 0;
  for (u32 k = 0; k < misses; ++k) {
    const u32 i = miss_index_[k], w = miss_worth_[k];
    if (w < c.bucket || (w == c.bucket && c.misses > 0)) {
      if (w == c.bucket) --c.misses;
      miss_index_[bypassed++] = i;
      continue;
    }
    load(s, i, take_line());
  }
  miss_index_.resize(bypassed);
}

void Planner::load(Step& s, u32 index, u32 line) {
  lists_.set_owner(line, s.pages[index]);
  word::admit(words_[s.pages[index]], line);
  loads_.push_back({index, line});
}

// Evicts the `count` lines that have been longest in a list. A word is fetched some lines before it is changed.
void Planner::drop(u32 list, u32 count) {
  u64 pages[ahead];
  u32 lines[ahead], taken = 0;
  auto give_up = [&](u32 k) {
    evict(pages[k % ahead], lines[k % ahead]);
    spare_.push_back(lines[k % ahead]);
  };
  if (count == 0) return;
  lists_.take(list, count, [&](u32 line, u64 page) {
    prefetch(words_[page]);
    if (taken >= ahead) give_up(taken - ahead);
    pages[taken % ahead] = page;
    lines[taken++ % ahead] = line;
  });
  for (u32 k = taken - std::min<u32>(taken, ahead); k < taken; ++k) give_up(k);
}

// line_count() when none was found.
u32 Planner::random_victim() {
  for (int k = 0; k < victim_tries && fresh_ > 0; ++k) {
    const u32 line =
        static_cast<u32>((static_cast<unsigned __int128>(mix(random_state_ += golden)) * fresh_) >> 64);
    const u64 w = word::load(words_[lists_.owner(line)]);
    const u32 pinned = policy_ == Policy::window_pin ? static_cast<u32>(word::uses_mask) : planned_mask_;
    if (state_of(w) == PageState::resident && !(uses_of(w) & pinned) && !kept(w)) return line;
  }
  return line_count();
}

void Planner::plan_by_chance(Step& s) {
  loads_.clear();
  loads_.reserve(std::min<size_t>(miss_index_.size(), line_count()));
  u32 bypassed = 0;
  for (const u32 i : miss_index_) {
    u32 line;
    if (free_lines()) {
      line = take_line();
    } else if ((line = random_victim()) < line_count()) {
      evict(lists_.owner(line), line);
    } else {
      miss_index_[bypassed++] = i;
      continue;
    }
    load(s, i, line);
  }
  miss_index_.resize(bypassed);
}

void Planner::retire(u64 number) {
  Step& s = step(number);
  if (number != retired_) throw std::logic_error("steps must retire in order: expected " + std::to_string(retired_));
  const bool was_planned = s.planned;
  const u32 bit = word::use_bit(number);
  if (!was_planned) planned_ = number + 1;  // withdrawn: the next uses are seen from the step after
  planned_mask_ &= ~bit;

  s.pages.visit([&](auto pages) {
    const size_t n = pages.size();
    u32 lines[group], from[group], to[group];
    for (size_t begin = 0; begin < n; begin += group) {
      const size_t end = std::min(n, begin + group);
      size_t moved = 0;
      for (size_t i = begin; i < end; ++i) {
        if (i + ahead < n) prefetch(words_[pages[i + ahead]]);
        const u64 w = word::retire(words_[pages[i]], bit);
        // Back into a list once no planned minibatch needs the line. Unplanned, it has been in one all along.
        if (by_lists() && idle(w) && (was_planned || by_use())) {
          lines[moved] = word::line_of(w);
          from[moved] = list_of_use(number, score::use_level(word::heat_of(w)));
          to[moved++] = list_of_worth(worth(w));
          lists_.prefetch(word::line_of(w));
        }
      }
      if (!was_planned) {
        for (size_t k = 0; k < moved; ++k) lists_.remove(lines[k], from[k]);
      }
      for (size_t k = 0; k < moved; ++k) lists_.push_back(lines[k], to[k]);
    }
  });
  recycled_.push_back(std::move(live_.front()));
  live_.pop_front();
  ++retired_;
}

void Planner::reclaim(u64 page, u32 line, bool failed) {
  word::fail(words_[page], line);
  std::lock_guard lock(failed_mutex_);
  failed_.push_back(line);
  failures_ += failed;
}

void Planner::audit() {
  auto require = [](bool ok, const char* what) {
    if (!ok) throw std::logic_error(std::string("planner audit: ") + what);
  };
  std::lock_guard lock(failed_mutex_);
  std::vector<bool> seen(line_count());
  std::array<u32, buckets> counts{};
  u64 held = 0;
  for (u64 p = 0; p < words_.size(); ++p) {
    const u64 w = word::load(words_[p]);
    if (state_of(w) == PageState::absent) {
      require(word::line_of(w) == 0, "an absent page names a line");
      continue;
    }
    const u32 line = word::line_of(w);
    require(line < line_count() && !seen[line], "a line holds two pages");
    require(lists_.owner(line) == p, "a line's owner is another page");
    seen[line] = true;
    ++held;
    if (by_lists() && idle(w)) ++counts[list_of_worth(worth(w))];
  }
  require(held + free_lines() + failed_.size() == line_count(), "a line is lost");
  if (by_lists())
    for (u32 b = 0; b < buckets; ++b) require(lists_.count(b) == counts[b], "a list's count is wrong");
}

}  // namespace gids::cache
