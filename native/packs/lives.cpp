#include "packs/lives.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace gids::packs {
namespace {

constexpr u64 ahead = 16;      // uses: a row's state is a cache miss each
constexpr u16 unused = 0xFFFF;  // no later step uses the copy

// The copies that a step makes, in the order of its uses.
struct Run {
  u32 step = 0;
  std::vector<u32> rows;
  std::vector<u16> deaths;
};

// Orders a run's copies as the sweep makes them: by chunk of the table, else as they are.
class SweepOrder {
 public:
  explicit SweepOrder(const AnnexPlan& plan)
      : chunk_rows_(static_cast<u32>(plan.chunk_rows())), chunks_(plan.chunks()) {}

  const std::vector<u32>& of(const Run& run) {
    const u32 n = static_cast<u32>(run.rows.size());
    order_.resize(n);
    if (n < chunks_ / sparse) {  // a count for each chunk would cost more than the run
      std::iota(order_.begin(), order_.end(), 0u);
      std::stable_sort(order_.begin(), order_.end(),
                       [&](u32 a, u32 b) { return run.rows[a] / chunk_rows_ < run.rows[b] / chunk_rows_; });
      return order_;
    }
    next_.assign(chunks_ + 1, 0);
    for (const u32 row : run.rows) ++next_[row / chunk_rows_ + 1];
    std::partial_sum(next_.begin(), next_.end(), next_.begin());
    for (u32 i = 0; i < n; ++i) order_[next_[run.rows[i] / chunk_rows_]++] = i;
    return order_;
  }

 private:
  static constexpr u64 sparse = 16;
  u32 chunk_rows_;
  u64 chunks_;
  std::vector<u32> order_, next_;
};

// Gives each copy of a run its slot. Runs of one lane are placed one after the other, others at the same time.
class Placer {
 public:
  Placer(AnnexPlan& plan, std::vector<u64>& next) : plan_(plan), next_(next), sweep_order_(plan) {}

  void place(const Run& run, Uses& uses) {
    const u64 n = run.rows.size(), first = plan_.first_slot(run.step), group = plan_.group_rows();
    const std::vector<u32>& order = sweep_order_.of(run);
    slots_.resize(n);
    for (u64 begin = 0; begin < n; begin += group) {
      const u64 end = std::min(n, begin + group);
      keys_.clear();
      for (u64 i = begin; i < end; ++i) keys_.push_back(u64{run.deaths[order[i]]} << 32 | order[i]);
      std::sort(keys_.begin(), keys_.end());
      for (u64 i = begin; i < end; ++i) {
        const u32 copy = static_cast<u32>(keys_[i - begin]);
        slots_[copy] = static_cast<u32>(first + i);
        u16& dies = plan_.page_dies[(first + i) / plan_.geometry.rows_per_page];
        dies = std::max(dies, run.deaths[copy]);
      }
    }
    const u32 chunk_rows = static_cast<u32>(plan_.chunk_rows());
    for (const u32 copy : order) {
      const u32 row = run.rows[copy], chunk = row / chunk_rows;
      u64& at = next_[chunk * u64{plan_.lanes} + run.step % plan_.lanes];
      plan_.list[at++] = {slots_[copy], static_cast<u16>(row - chunk * chunk_rows), static_cast<u16>(run.step)};
    }
    uses.write_slots(run.step, slots_);
  }

 private:
  AnnexPlan& plan_;
  std::vector<u64>& next_;  // the end of each list, so far
  SweepOrder sweep_order_;
  std::vector<u32> slots_;
  std::vector<u64> keys_;
};

struct Slice {
  std::vector<u32> rows, slots;
  std::vector<u16> notes;
  Run missed;
  bool repeats = false;  // it has rows that the step uses several times

  void read(const Uses& uses, u32 step, u64 begin, u64 n) {
    rows.resize(n);
    notes.resize(n);
    uses.read_rows(step, begin, rows);
    uses.read_notes(step, begin, notes);
  }
};

// Finds the copies that a step makes, with their deaths. dies: of each row's copy, so far.
void find_deaths(const Uses& uses, Team& team, u32 step, HugeArray<u16>& dies, std::vector<Slice>& slices, Run& run) {
  const u64 size = uses.size(step);
  const u32 count = team.slices(size);
  team.run(count, [&](u32 k) {
    Slice& s = slices[k];
    const u64 begin = team.begin(size, k), n = team.begin(size, k + 1) - begin;
    s.read(uses, step, begin, n);
    s.missed.rows.clear();
    s.missed.deaths.clear();
    for (u64 i = 0; i < n; ++i) {
      if (i + ahead < n) __builtin_prefetch(&dies[s.rows[i + ahead]], 1);
      if (note::next_of(s.notes[i]) == step) continue;  // noted with another use of this step
      u16& death = dies[s.rows[i]];
      const u16 last = death == unused ? static_cast<u16>(step) : death;
      if (s.notes[i] & note::hit) {
        death = last;
      } else {
        s.missed.rows.push_back(s.rows[i]);
        s.missed.deaths.push_back(last);
        death = unused;
      }
    }
  });
  run.step = step;
  run.rows.clear();
  run.deaths.clear();
  for (u32 k = 0; k < count; ++k) {
    const Run& m = slices[k].missed;
    run.rows.insert(run.rows.end(), m.rows.begin(), m.rows.end());
    run.deaths.insert(run.deaths.end(), m.deaths.begin(), m.deaths.end());
  }
}

}  // namespace

void place_copies(Uses& uses, Team& team, AnnexPlan& plan, const Check& check) {
  plan.list = HugeArray<Copy>(plan.copies);
  plan.page_dies.assign(plan.page_count(), 0);
  std::vector<u64> next(plan.list_begin.begin(), plan.list_begin.end() - 1);
  HugeArray<u16> dies(uses.row_count());
  std::fill(dies.data(), dies.data() + dies.size(), unused);
  std::vector<Slice> slices(team.threads());
  std::vector<Run> runs(plan.lanes);  // one of each lane
  std::vector<Placer> placers(plan.lanes, Placer(plan, next));
  for (u32 step = plan.steps; step > 0;) {
    u32 found = 0;
    while (found < plan.lanes && step > 0) {
      check();
      find_deaths(uses, team, --step, dies, slices, runs[found]);
      const Run& run = runs[found++];
      plan.once += static_cast<u64>(std::count(run.deaths.begin(), run.deaths.end(), static_cast<u16>(step)));
    }
    team.run(found, [&](u32 i) { placers[i].place(runs[i], uses); });
  }
}

void note_positions(Uses& uses, Team& team, const Misses& misses, const AnnexPlan& plan, const Check& check) {
  HugeArray<u32> position(uses.row_count());
  std::vector<Slice> slices(team.threads());
  for (u32 step = 0; step < plan.steps; ++step) {
    check();
    const u64 size = uses.size(step);
    const u32 count = team.slices(size);
    const u32* const missed = &misses.of_slice[u64{step} * team.threads()];
    team.run(count, [&](u32 k) {
      Slice& s = slices[k];
      const u64 begin = team.begin(size, k), n = team.begin(size, k + 1) - begin;
      s.read(uses, step, begin, n);
      s.slots.resize(missed[k]);
      uses.read_slots(step, std::accumulate(missed, missed + k, u64{0}), s.slots);
      s.repeats = false;
      const u32* slot = s.slots.data();
      for (u64 i = 0; i < n; ++i) {
        if (i + ahead < n) __builtin_prefetch(&position[s.rows[i + ahead]], 1);
        if (note::next_of(s.notes[i]) == step) {
          s.repeats = true;  // the slice that has the row's other use may not have come to it
          continue;
        }
        u32& at = position[s.rows[i]];
        if (!(s.notes[i] & note::hit)) at = *slot++;
        s.rows[i] = at;
      }
    });
    team.run(count, [&](u32 k) {
      Slice& s = slices[k];
      if (s.repeats)
        for (u64 i = 0; i < s.rows.size(); ++i)
          if (note::next_of(s.notes[i]) == step) s.rows[i] = position[s.rows[i]];
      uses.write_rows(step, team.begin(size, k), s.rows);
    });
  }
}

}  // namespace gids::packs
