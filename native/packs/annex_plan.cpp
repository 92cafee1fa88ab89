#include "packs/annex_plan.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "packs/lives.h"

namespace gids::packs {
namespace {

// Chunks are pages of all shards; groups are whole blocks of direct I/O.
void lay_out(AnnexPlan& plan, const PlanOptions& options) {
  const cache::Geometry& g = plan.geometry;
  constexpr u64 rows_max = u64{1} << 16;  // of a chunk: Copy::row_in_chunk
  const u64 most_pages = std::min<u64>(options.chunk_bytes / g.page_bytes, rows_max / g.rows_per_page);
  plan.chunk_pages = std::max<u64>(most_pages / g.shard_count, 1) * g.shard_count;
  if (plan.chunk_rows() > rows_max)
    throw std::invalid_argument("a page has " + std::to_string(g.rows_per_page) + " rows in " +
                                std::to_string(g.shard_count) + " shards; an annex takes at most 65536 rows at a time");
  const u64 unit = AnnexPlan::direct_alignment / std::gcd(AnnexPlan::direct_alignment, u64{g.page_bytes});
  plan.group_pages = std::max<u64>(options.group_bytes / g.page_bytes / unit, 1) * unit;
}

// Runs begin at blocks of direct I/O.
void place_runs(AnnexPlan& plan, const std::vector<u64>& missed) {
  const cache::Geometry& g = plan.geometry;
  const u64 unit = AnnexPlan::direct_alignment / std::gcd(AnnexPlan::direct_alignment, u64{g.page_bytes});
  plan.missed = missed;
  plan.first_page.assign(1, 0);
  for (const u64 rows : missed) {
    plan.copies += rows;
    plan.first_page.push_back(plan.first_page.back() + align_up(div_ceil(rows, g.rows_per_page), unit));
  }
  if (plan.page_count() * g.rows_per_page >= u64{1} << 32)
    throw std::length_error("the superbatch needs " + std::to_string(plan.copies) +
                            " copies of rows, more than positions of 4 bytes have: make it shorter");
}

void list_deaths(AnnexPlan& plan) {
  plan.dying_begin.assign(plan.steps + 1, 0);
  auto each = [&](auto f) {
    for (u32 step = 0; step < plan.steps; ++step)
      for (u64 page = plan.first_page[step]; page < plan.first_page[step + 1]; ++page)
        if (plan.page_dies[page] > step) f(page);
  };
  each([&](u64 page) { ++plan.dying_begin[plan.page_dies[page] + 1]; });
  std::partial_sum(plan.dying_begin.begin(), plan.dying_begin.end(), plan.dying_begin.begin());
  plan.dying.resize(plan.dying_begin.back());
  std::vector<u64> next(plan.dying_begin.begin(), plan.dying_begin.end() - 1);
  each([&](u64 page) { plan.dying[next[plan.page_dies[page]]++] = static_cast<u32>(page); });
}

}  // namespace

size_t AnnexPlan::memory_bytes() const {
  return (first_page.capacity() + missed.capacity() + list_begin.capacity() + dying_begin.capacity()) * sizeof(u64) +
         page_dies.capacity() * sizeof(u16) + dying.capacity() * sizeof(u32) + list.bytes();
}

u64 AnnexPlan::lines_needed(u32 ahead) const {
  std::vector<i64> change(steps + 1);
  for (u32 step = 0; step < steps; ++step)
    for (u64 page = first_page[step]; page < first_page[step + 1]; ++page)
      if (page_dies[page] > step) {
        ++change[step - std::min(step, ahead)];
        --change[page_dies[page] + 1];
      }
  i64 now = 0, most = 0;
  for (const i64 c : change) most = std::max(most, now += c);
  return static_cast<u64>(most);
}

std::unique_ptr<AnnexPlan> plan_annex(Uses& uses, const cache::Geometry& geometry, const PlanOptions& options,
                                      cache::Workers& workers, const Check& check) {
  geometry.validate();
  if (geometry.row_count != uses.row_count()) throw std::invalid_argument("the uses are of another table");
  auto plan = std::make_unique<AnnexPlan>();
  plan->geometry = geometry;
  plan->steps = uses.steps();
  plan->lanes = workers.threads();
  lay_out(*plan, options);
  Team team(workers);
  note_next_uses(uses, team, check);
  const Misses misses =
      note_misses(uses, team, options.capacity_rows, plan->chunk_rows(), plan->lanes, check);
  place_runs(*plan, misses.of_step);
  plan->list_begin.assign(misses.of_list.size() + 1, 0);
  std::partial_sum(misses.of_list.begin(), misses.of_list.end(), plan->list_begin.begin() + 1);
  place_copies(uses, team, *plan, check);
  note_positions(uses, team, misses, *plan, check);
  list_deaths(*plan);
  return plan;
}

}  // namespace gids::packs
