#include "packs/belady.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <utility>

#include "cache/memory.h"

namespace gids::packs {
namespace {

using i16 = short;

constexpr u16 not_yet = 0xFFFF;  // no step has used the row
static_assert(not_yet > note::most_steps);

// The rows in the cache, counted by their next use and by range. A row is in the cache until its count is dropped:
// then every row of this next use and range goes, however many there are.
class Counted {
 public:
  Counted(u64 row_count, u32 steps, u32 threads)
      : steps_(steps),
        ranges_(std::clamp<u64>(row_count, 1, ranges_max)),
        per_row_((ranges_ << fraction_bits) / std::max<u64>(row_count, 1)),
        counts_(threads, std::vector<u32>(steps * ranges_)),
        by_step_(threads, std::vector<u32>(steps)),
        dropped_(steps * ranges_, not_dropped) {}

  // Whether a row that step `before` used last is in the cache at `step`. Any thread.
  bool has(u32 row, u32 before, u32 step) const {
    return dropped_[step * ranges_ + range(row)] < static_cast<int>(before);
  }
  // One thread of each number at a time.
  void add(u32 thread, u32 row, u32 next) {
    ++counts_[thread][next * ranges_ + range(row)];
    ++by_step_[thread][next];
  }

  // The step has used its rows, after add() for all of them: drops what is above the capacity.
  void end_step(u32 step, u64 capacity) {
    for (auto& count : by_step_) count[step] = 0;  // they were added again, under their next use
    u64 held = 0;
    std::vector<u64>& sums = sums_;
    sums.assign(steps_, 0);
    for (const auto& count : by_step_)
      for (u32 s = step + 1; s < steps_; ++s) sums[s] += count[s];
    for (u32 s = step + 1; s < steps_; ++s) held += sums[s];
    for (u32 s = steps_; held > capacity && s-- > step + 1;)
      for (u64 f = ranges_; sums[s] && held > capacity && f-- > 0;) {
        const u64 count = drop(s, f, step);
        held -= count;
        sums[s] -= count;
      }
  }

 private:
  static constexpr u32 fraction_bits = 40;
  static constexpr i16 not_dropped = -1;

  u64 range(u32 row) const { return row * per_row_ >> fraction_bits; }
  u64 drop(u32 next, u64 f, u32 step) {
    u64 count = 0;
    for (size_t thread = 0; thread < counts_.size(); ++thread) {
      const u32 mine = std::exchange(counts_[thread][next * ranges_ + f], 0);
      by_step_[thread][next] -= mine;
      count += mine;
    }
    if (count) dropped_[next * ranges_ + f] = static_cast<i16>(step);
    return count;
  }

  u64 steps_, ranges_, per_row_;
  std::vector<std::vector<u32>> counts_;   // of each thread: [next use * ranges + range]
  std::vector<std::vector<u32>> by_step_;  // of each thread: [next use], their sum over ranges
  std::vector<i16> dropped_;               // at which step each count was dropped last
  std::vector<u64> sums_;
};

}  // namespace

void note_next_uses(Uses& uses, Team& team, const Check& check) {
  HugeArray<u16> next(uses.row_count());
  std::fill(next.data(), next.data() + next.size(), static_cast<u16>(uses.steps()));
  for (u32 step = uses.steps(); step-- > 0;) {
    check();
    team.in_slices(uses, step, false, [&](Slice& s) {
      for (u64 i = 0; i < s.size(); ++i) {
        if (i + rows_ahead < s.size()) __builtin_prefetch(&next[s.rows[i + rows_ahead]], 1);
        // An exchange, as another slice may have the same row: one of its uses gets the next step, the others this one.
        s.notes[i] = std::atomic_ref<u16>(next[s.rows[i]]).exchange(static_cast<u16>(step), std::memory_order_relaxed);
      }
      uses.write_notes(step, s.begin, s.notes);
    });
  }
}

std::vector<u64> note_misses(Uses& uses, Team& team, u64 capacity_rows, const Check& check) {
  const u32 steps = uses.steps(), threads = team.threads();
  HugeArray<u16> before(uses.row_count());  // the step that used each row last
  std::fill(before.data(), before.data() + before.size(), not_yet);
  Counted cached(uses.row_count(), steps, threads);
  std::vector<u64> missed(threads), of_step(steps);
  for (u32 step = 0; step < steps; ++step) {
    check();
    const u32 count = team.in_slices(uses, step, true, [&](Slice& s) {
      u64 n = 0;
      for (u64 i = 0; i < s.size(); ++i) {
        if (i + rows_ahead < s.size()) __builtin_prefetch(&before[s.rows[i + rows_ahead]], 1);
        const u32 row = s.rows[i], next = s.notes[i];
        if (next == step) continue;  // noted with another use of this step
        const u16 last = std::exchange(before[row], static_cast<u16>(step));
        if (next < steps) cached.add(s.number, row, next);
        if (last != not_yet && cached.has(row, last, step)) s.notes[i] |= note::hit;
        else ++n;
      }
      missed[s.number] = n;
      uses.write_notes(step, s.begin, s.notes);
    });
    of_step[step] = std::accumulate(missed.begin(), missed.begin() + count, u64{0});
    cached.end_step(step, capacity_rows);
  }
  return of_step;
}

}  // namespace gids::packs
