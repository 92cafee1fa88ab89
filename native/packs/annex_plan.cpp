#include "packs/annex_plan.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <stdexcept>

#include "packs/moves.h"

namespace gids::packs {
namespace {

// Chunks are pages of all shards; groups are whole blocks of direct I/O.
void lay_out(AnnexPlan& plan, const PlanOptions& options) {
  const cache::Geometry& g = plan.geometry;
  constexpr u64 most_rows = u64{1} << 15;  // of a chunk: the sweep lists their copies
  const u64 pages = std::min<u64>(options.chunk_bytes / g.page_bytes, most_rows / g.rows_per_page);
  plan.chunk_pages = std::max<u64>(pages / g.shard_count, 1) * g.shard_count;
  plan.stride = stride_of(g.row_bytes);
  const u64 unit = block_rows(plan.stride);
  plan.group_rows = std::max<u64>(options.group_bytes / (unit * plan.stride), 1) * unit;
}

void place_runs(AnnexPlan& plan, const std::vector<u64>& missed) {
  plan.run_begin.assign(1, 0);
  plan.moves.resize(plan.steps);
  for (u32 step = 0; step < plan.steps; ++step) {
    plan.copies += missed[step];
    plan.moves[step].copies = static_cast<u32>(missed[step]);
    plan.run_begin.push_back(align_up(plan.run_begin.back() + missed[step] * plan.stride, block_bytes));
  }
}

}  // namespace

u64 stride_of(u64 row_bytes) {
  return align_up(row_bytes, std::clamp<u64>(std::bit_floor(row_bytes) / 16, 1, block_bytes));
}

u64 block_rows(u64 stride) { return block_bytes / std::gcd(block_bytes, stride); }

u32 AnnexPlan::runs() const {
  return static_cast<u32>(std::count_if(moves.begin(), moves.end(), [](const Moves& m) { return m.copies > 0; }));
}

std::unique_ptr<AnnexPlan> plan_annex(Uses& uses, const cache::Geometry& geometry, const PlanOptions& options,
                                      cache::Workers& workers, const Check& check) {
  geometry.validate();
  if (geometry.row_count != uses.row_count()) throw std::invalid_argument("the uses are of another table");
  if (options.lines >= u64{1} << 31) throw std::length_error("lines are numbers of 31 bits: there are too many");
  auto plan = std::make_unique<AnnexPlan>();
  plan->geometry = geometry;
  plan->steps = uses.steps();
  plan->lines = options.lines;
  lay_out(*plan, options);
  Team team(workers);
  note_next_uses(uses, team, check);
  place_runs(*plan, note_misses(uses, team, options.lines, check));
  note_lives(uses, team, *plan, check);
  write_moves(uses, team, *plan, options.lines, check);
  return plan;
}

}  // namespace gids::packs
