// The planner: decides which pages are in the cache. Pure metadata over the page words; it touches no
// features and does no I/O, so that a recorded trace can be replayed against any cache size.
// Called by PageCache (one thread at a time) and, through bind/, by benchmarks. Completions change the
// states of LOADING words meanwhile; see page_word.h for who may change what.
//
// The life of a step (a minibatch's position in the stream, never repeated):
//     enter(s): its pages are marked     plan(s): hits, loads, bypasses     retire(s): marks taken back
// in order within each, at most word::use_bits steps entered and not retired.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "cache/lists.h"
#include "cache/memory.h"
#include "gids/page_score.h"
#include "gids/page_word.h"

namespace gids::cache {

enum class Policy : u8 {
  lookahead,   // nearest next use in the window; beyond the window, highest heat
  window_pin,  // GIDS as published: pages in the window are pinned, the victim is random among the rest
  random,      // the victim is random
  lru,         // the victim is the least recently used
  fixed,       // "static": highest heat, whatever is used
  pinned,      // the hottest pages have pinned_share of the lines for good, the victim is random among the rest
};

constexpr double pinned_share = 0.4;  // as in the baseline of Park et al., GIDS, Figure 11

// A missing page that wins a line.
struct Load {
  u32 index;  // into Step::pages
  u32 line;
};

// Pages in 4 bytes each, or in 8 where a table has 2^32 pages or more.
class PageList {
 public:
  u64 operator[](size_t i) const { return wide_.empty() ? narrow_[i] : wide_[i]; }
  size_t size() const { return narrow_.size() + wide_.size(); }
  size_t bytes() const { return narrow_.capacity() * sizeof(u32) + wide_.capacity() * sizeof(u64); }
  void assign(std::span<const u32> pages) { narrow_.assign(pages.begin(), pages.end()); }
  void assign(std::span<const u64> pages) { wide_.assign(pages.begin(), pages.end()); }
  void clear() {
    narrow_.clear();
    wide_.clear();
  }
  // f(span of pages), for loops that should not ask for the width of each.
  template <class F>
  void visit(F&& f) const {
    if (wide_.empty()) f(std::span<const u32>(narrow_));
    else f(std::span<const u64>(wide_));
  }

 private:
  std::vector<u32> narrow_;
  std::vector<u64> wide_;
};

struct Step {
  u64 number = 0;
  bool planned = false;
  u64 hits = 0, coalesced = 0;  // of the hits, how many were still LOADING
  PageList pages;               // unique, in order of first appearance
};

struct PlannerStats {
  u64 steps = 0, pages = 0, hits = 0, coalesced = 0, loads = 0, bypasses = 0, evictions = 0, failures = 0;
};

class Planner {
 public:
  // heat: one byte per page, or empty for all equal. keep: a page of the highest heat, 255, keeps its line for good.
  Planner(u64 pages, u32 lines, Policy policy, u64 seed, std::span<const u8> heat, bool keep = false);

  // Throws std::out_of_range with the first id that is not below row_count.
  static void check(std::span<const i64> ids, u64 row_count);

  // ids: rows when rows_per_page > 1, else pages; may repeat. Checks every id before it marks any.
  // `step` is one more than the step entered last; with none live it may leave some out.
  Step& enter(u64 step, std::span<const i64> ids, u64 row_count, u32 rows_per_page);
  Step& plan(u64 step);
  // What the last plan() decided about its missing pages; until the next one.
  std::span<const Load> loads() const { return loads_; }
  std::span<const u32> bypassed() const { return miss_index_; }  // indices into Step::pages: no line was won
  // Planned or not (a stream that is closed early takes back marks of steps it never planned).
  void retire(u64 step);

  // The load of `line` did not come to its end: it failed, or was cancelled. Any thread.
  void reclaim(u64 page, u32 line, bool failed);

  u64& word(u64 page) { return words_[page]; }
  std::span<u64> words() { return {words_.data(), words_.size()}; }
  u64 page_count() const { return words_.size(); }
  u32 line_count() const { return line_count_; }
  bool all_lines_used() const { return fresh_ > 0 && fresh_ == line_count_; }  // each has had a page
  Step& step(u64 number);
  u64 first_live() const { return retired_; }
  u64 entered() const { return entered_; }
  u64 planned() const { return planned_; }
  PlannerStats stats() const { return stats_; }
  size_t table_bytes() const { return words_.bytes(); }
  size_t line_bytes() const { return lists_.bytes(); }
  static size_t least_line_bytes() { return BucketLists(0, buckets).bytes(); }  // without a line
  size_t step_bytes() const;                                                    // pages of live steps
  size_t plan_bytes() const;                                                    // what planning needs

  // Recounts every list and field from the words; throws std::logic_error on the first disagreement.
  void audit();

 private:
  static constexpr u32 use_levels = score::use_levels, buckets = score::buckets;
  using Histogram = std::array<u32, buckets>;

  bool by_lists() const { return policy_ == Policy::lookahead || policy_ == Policy::lru || policy_ == Policy::fixed; }
  bool by_use() const { return policy_ == Policy::lookahead; }
  bool kept(u64 w) const { return keep_ && word::heat_of(w) == word::heat_levels - 1; }
  bool idle(u64 w) const {  // resident, and neither kept nor needed by a planned minibatch
    return state_of(w) == PageState::resident && !(uses_of(w) & planned_mask_) && !kept(w);
  }
  u32 worth(u64 w) const;               // bucket in order of worth, seen from planned_ (the next step)
  u32 list_of_worth(u32 bucket) const;  // the list that holds that bucket's lines
  // Lists of lines whose next use is that step, coldest first.
  static u32 list_of_use(u64 step, u32 level) {
    return word::heat_levels + static_cast<u32>(step % word::use_bits) * use_levels + level;
  }
  u32 miss_worth(u64 w) const;

  template <class Page>
  void mark(Step& s, std::span<const i64> ids, u32 rows_per_page, std::vector<Page>& scratch);
  void look_up(Step& s);
  u32 free_lines() const { return static_cast<u32>(spare_.size()) + (line_count() - fresh_); }
  u32 take_line();
  void evict(u64 page, u32 line);
  void drop(u32 list, u32 count);
  void load(Step& s, u32 index, u32 line);
  void plan_by_lists(Step& s);
  void plan_by_chance(Step& s);
  u32 random_victim();
  void pin(u64 count);

  static PageState state_of(u64 w) { return word::state_of(w); }
  static u32 uses_of(u64 w) { return word::uses_of(w); }

  Policy policy_;
  bool keep_;
  HugeArray<u64> words_;
  u32 line_count_;
  BucketLists lists_;
  std::vector<u32> spare_;  // lines given back
  u32 fresh_ = 0;           // lines below it have been used
  std::mutex failed_mutex_;
  std::vector<u32> failed_;  // lines given back by completions
  u64 failures_ = 0;         // guarded by failed_mutex_

  std::deque<std::unique_ptr<Step>> live_;       // retired_ .. entered_ - 1
  std::vector<std::unique_ptr<Step>> recycled_;  // their vectors keep their memory
  u64 entered_ = 0, planned_ = 0, retired_ = 0;
  u32 planned_mask_ = 0;  // use bits of planned, not retired steps
  u64 random_state_;
  PlannerStats stats_;

  // Of one step at a time.
  std::vector<u32> narrow_pages_;
  std::vector<u64> wide_pages_;
  std::vector<Load> loads_;
  std::vector<u32> miss_index_;  // missing pages; once they are planned, those of them that win no line
  std::vector<u16> miss_worth_;
  Histogram misses_by_worth_{};
};

}  // namespace gids::cache
