#include "packs/moves.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <unordered_map>
#include <utility>

namespace gids::packs {
namespace {

struct Use {
  u32 number;  // of its step
  u32 row;
  u32 line;  // of a new copy: that keeps it, or no_line
};

// A step's new copies, and its uses of rows that it uses elsewhere, too, in the order of its uses.
struct Run {
  u32 step = 0;
  std::vector<Use> copies, repeated;
};

// Orders a run's copies as the sweep makes them: by chunk of the table, else as they are.
class SweepOrder {
 public:
  explicit SweepOrder(const AnnexPlan& plan)
      : chunk_rows_(static_cast<u32>(plan.chunk_rows())), chunks_(plan.chunks()) {}

  const std::vector<u32>& of(const std::vector<Use>& copies) {
    const u32 n = static_cast<u32>(copies.size());
    order_.resize(n);
    if (n < chunks_ / sparse) {  // a count for each chunk would cost more than the run
      std::iota(order_.begin(), order_.end(), 0u);
      std::stable_sort(order_.begin(), order_.end(),
                       [&](u32 a, u32 b) { return copies[a].row / chunk_rows_ < copies[b].row / chunk_rows_; });
      return order_;
    }
    next_.assign(chunks_ + 1, 0);
    for (const Use& use : copies) ++next_[use.row / chunk_rows_ + 1];
    std::partial_sum(next_.begin(), next_.end(), next_.begin());
    for (u32 i = 0; i < n; ++i) order_[next_[copies[i].row / chunk_rows_]++] = i;
    return order_;
  }

 private:
  static constexpr u64 sparse = 16;
  u32 chunk_rows_;
  u64 chunks_;
  std::vector<u32> order_, next_;
};

// Places the copies of runs, one run after the other.
class Placer {
 public:
  explicit Placer(const AnnexPlan& plan) : sweep_order_(plan) {}

  void place(const Run& run, Uses& uses) {
    const std::vector<u32>& order = sweep_order_.of(run.copies);
    numbers_.clear();
    for (const u32 i : order) numbers_.push_back(run.copies[i].row);
    uses.write_copies(run.step, numbers_);
    numbers_.clear();
    for (const u32 i : order) numbers_.push_back(run.copies[i].number);
    for (const u32 i : order) numbers_.push_back(run.copies[i].line);
    add_repeated(run);
    uses.write_run(run.step, numbers_);
  }

 private:
  void add_repeated(const Run& run) {
    if (run.repeated.empty()) return;
    std::unordered_map<u32, u32> first;  // use of a new copy, by row
    for (const Use& copy : run.copies) first.emplace(copy.row, copy.number);
    for (const Use& use : run.repeated) {
      numbers_.push_back(use.number);
      numbers_.push_back(first.at(use.row));
    }
  }

  SweepOrder sweep_order_;
  std::vector<u32> numbers_;
};

// The lines of copies, from step to step.
class Lines {
 public:
  explicit Lines(u64 row_count, u64 lines, u32 threads) : line_of_(row_count), parts_(threads), left_(lines) {}

  // The copies of a step and their lines. Steps in their order.
  void step(Uses& uses, Team& team, u32 step, Run& run) {
    run.step = step;
    run.copies.clear();
    run.repeated.clear();
    const u32 count = team.in_slices(uses, step, true, [&](Slice& s) { find(s); });
    bool repeated = false;
    for (u32 k = 0; k < count; ++k) {
      free_.insert(free_.end(), parts_[k].left.begin(), parts_[k].left.end());
      run.copies.insert(run.copies.end(), parts_[k].copies.begin(), parts_[k].copies.end());
      repeated |= !parts_[k].repeated.empty();
    }
    if (repeated) resolve(run, count);
    for (u32 k = 0; k < count; ++k) uses.write_lines(step, parts_[k].begin, parts_[k].lines);
    for (Use& copy : run.copies)
      if (copy.line != no_line) line_of_[copy.row] = copy.line = take();
  }

 private:
  struct Part {
    u64 begin = 0;
    std::vector<u32> lines;
    std::vector<u32> left;  // lines that no later step needs
    std::vector<Use> copies, repeated;
  };

  void find(Slice& s) {
    Part& part = parts_[s.number];
    part.begin = s.begin;
    part.lines.assign(s.size(), no_line);
    part.left.clear();
    part.copies.clear();
    part.repeated.clear();
    for (u64 i = 0; i < s.size(); ++i) {
      if (i + rows_ahead < s.size()) __builtin_prefetch(&line_of_[s.rows[i + rows_ahead]], 1);
      const u32 row = s.rows[i], number = static_cast<u32>(s.begin + i);
      switch (s.notes[i]) {
        case note::in_line: part.lines[i] = line_of_[row]; break;
        case note::leaves: part.left.push_back(part.lines[i] = line_of_[row]); break;
        case note::repeated: part.repeated.push_back({number, row, no_line}); break;
        default: part.copies.push_back({number, row, s.notes[i] == note::enters ? 0 : no_line}); break;
      }
    }
  }

  // Uses of a row beside its first one of the step are copied from the same line, or repeat its new copy.
  void resolve(Run& run, u32 count) {
    std::unordered_map<u32, bool> is_new;
    for (u32 k = 0; k < count; ++k)
      for (const Use& use : parts_[k].repeated) is_new.emplace(use.row, false);
    for (const Use& copy : run.copies)
      if (const auto found = is_new.find(copy.row); found != is_new.end()) found->second = true;
    for (u32 k = 0; k < count; ++k)
      for (const Use& use : parts_[k].repeated) {
        if (is_new[use.row]) run.repeated.push_back(use);
        else parts_[k].lines[use.number - parts_[k].begin] = line_of_[use.row];
      }
  }

  u32 take() {
    if (!free_.empty()) {
      const u32 line = free_.back();
      free_.pop_back();
      return line;
    }
    if (!left_) throw std::logic_error("a plan of an annex keeps more copies than there are lines");
    return static_cast<u32>(--left_);
  }

  HugeArray<u32> line_of_;  // of each row whose copy is kept
  std::vector<Part> parts_;
  std::vector<u32> free_;  // lines that were used
  u64 left_;               // lines that were not
};

}  // namespace

void note_lives(Uses& uses, Team& team, AnnexPlan& plan, const Check& check) {
  HugeArray<bool> needed(uses.row_count());  // whether a later step uses the row's copy
  std::vector<u64> kept(team.threads());
  for (u32 step = plan.steps; step-- > 0;) {
    check();
    team.in_slices(uses, step, true, [&](Slice& s) {
      for (u64 i = 0; i < s.size(); ++i) {
        if (i + rows_ahead < s.size()) __builtin_prefetch(&needed[s.rows[i + rows_ahead]], 1);
        if (note::next_of(s.notes[i]) == step) {
          s.notes[i] = note::repeated;
          continue;
        }
        const bool hit = s.notes[i] & note::hit, later = std::exchange(needed[s.rows[i]], hit);
        kept[s.number] += !hit && later;
        s.notes[i] = hit ? (later ? note::in_line : note::leaves) : (later ? note::enters : note::passes);
      }
      uses.write_notes(step, s.begin, s.notes);
    });
  }
  plan.kept = std::accumulate(kept.begin(), kept.end(), u64{0});
}

void write_moves(Uses& uses, Team& team, AnnexPlan& plan, u64 lines, const Check& check) {
  Lines kept(uses.row_count(), lines, team.threads());
  std::vector<Run> runs(std::min(team.threads(), runs_at_once));  // that are placed at the same time
  std::vector<Placer> placers(runs.size(), Placer(plan));
  for (u32 step = 0; step < plan.steps;) {
    u32 found = 0;
    for (; found < runs.size() && step < plan.steps; ++step, ++found) {
      check();
      kept.step(uses, team, step, runs[found]);
      plan.moves[step].repeated = static_cast<u32>(runs[found].repeated.size());
    }
    team.run(found, [&](u32 i) { placers[i].place(runs[i], uses); });
  }
}

}  // namespace gids::packs
