#include "cache/optimum.h"

#include <stdexcept>
#include <string>
#include <vector>

namespace gids::cache {

u64 unique_pages(std::span<const i64> ids, u32 rows_per_page, std::span<u32> marks, u32 mark, i64* out) {
  constexpr size_t ahead = 32;  // marks lie anywhere: fetch them early
  u64 count = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (i + ahead < ids.size()) {
      const u64 later = static_cast<u64>(ids[i + ahead]) / rows_per_page;
      if (later < marks.size()) __builtin_prefetch(&marks[later], 1, 3);
    }
    const u64 page = static_cast<u64>(ids[i]) / rows_per_page;
    if (page >= marks.size())
      throw std::out_of_range("id " + std::to_string(ids[i]) + " at position " + std::to_string(i) +
                              " is beyond page " + std::to_string(marks.size()));
    out[count] = static_cast<i64>(page);
    count += marks[page] != mark;
    marks[page] = mark;
  }
  return count;
}

// Only the number of held pages by next use matters: those used next by minibatch t are its hits, and the pages
// used last are dropped.
void min_hits(std::span<const u32> next, std::span<const i64> ends, u64 lines, u64 warm, std::span<i64> hits) {
  const size_t batches = hits.size();
  if (ends.size() != batches + 1 || static_cast<u64>(ends[batches]) != next.size() || ends[0] != 0)
    throw std::invalid_argument("min_hits: ends must run from 0 to the length of next, one per minibatch");
  std::vector<u64> used_by(batches + 1);  // pages held, by the minibatch that uses them next
  size_t last = 0;                        // no page is held for a later one
  u64 held = 0;
  for (size_t t = 0; t < batches; ++t) {
    if (ends[t + 1] < ends[t]) throw std::invalid_argument("min_hits: ends must not fall");
    hits[t] = static_cast<i64>(used_by[t]);
    held -= used_by[t];
    used_by[t] = 0;
    for (i64 k = ends[t]; k < ends[t + 1]; ++k) {
      const size_t use = next[static_cast<size_t>(k)];
      if (use >= batches) continue;
      if (use <= t) throw std::invalid_argument("min_hits: a page is used next before it is used");
      ++used_by[use];
      ++held;
      if (use > last) last = use;
    }
    if (t + 1 < warm) continue;
    while (held > lines) {
      const u64 gone = held - lines < used_by[last] ? held - lines : used_by[last];
      used_by[last] -= gone;
      held -= gone;
      if (!used_by[last]) --last;
    }
  }
}

}  // namespace gids::cache
