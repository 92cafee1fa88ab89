#include "packs/capacity.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <system_error>

#include <sys/mman.h>
#include <unistd.h>

#include "gids/page_score.h"

namespace gids::packs {
namespace {

constexpr u64 sampled_lines = 8192;  // of which the sample has rows for, or twice as many: the result varies by 1 %
// A group of the sample has as many pages as another one, so as many of them have rows of different deaths. But a step
// must have enough uses for that.
constexpr u64 least_pages = 64;
constexpr u64 part_uses = 1 << 16;   // uses that are read at a time
constexpr int tries = 6;
constexpr double close_enough = 0.005, margin = 0.98;

// One row of each `rate` successive ones, at random: row r of the sample is one of rows r * rate to (r + 1) * rate - 1.
class Sample {
 public:
  Sample(const Uses& uses, const cache::Geometry& geometry, u64 rate, const Check& check)
      : geometry_(geometry), rate_(rate), steps_(uses.steps()) {
    geometry_.row_count = div_ceil(geometry.row_count, rate);
    geometry_.shard_count = 1;
    std::vector<u32> part;
    for (u32 step = 0; step < uses.steps(); ++step) {
      check();
      for (u64 begin = 0; begin < uses.size(step); begin += part_uses) {
        part.resize(std::min(part_uses, uses.size(step) - begin));
        uses.read_rows(step, begin, part);
        for (const u32 row : part)
          if (row % rate == score::mix(row / rate) % rate) steps_[step].push_back(static_cast<u32>(row / rate));
      }
    }
  }

  // Of all rows, for a cache of so many.
  double lines_needed(u64 capacity_rows, u32 ahead, PlanOptions options, cache::Workers& workers,
                      const Check& check) const {
    struct Memory {
      Memory() : fd(memfd_create("gids-annex-sample", MFD_CLOEXEC)) {
        if (fd < 0) throw std::system_error(errno, std::generic_category(), "memory for a sample of rows");
      }
      ~Memory() { close(fd); }
      int fd;
    };
    const Memory memory;
    Uses uses(memory.fd, geometry_.row_count);
    for (const auto& rows : steps_) uses.append(rows);
    options.capacity_rows = capacity_rows / rate_;
    return static_cast<double>(plan_annex(uses, geometry_, options, workers, check)->lines_needed(ahead)) *
           static_cast<double>(rate_);
  }

 private:
  cache::Geometry geometry_;
  const u64 rate_;
  std::vector<std::vector<u32>> steps_;
};

}  // namespace

u64 capacity_for(const Uses& uses, const cache::Geometry& geometry, const PlanOptions& options, u64 lines, u32 ahead,
                 cache::Workers& workers, const Check& check) {
  const u64 most = lines * geometry.rows_per_page;
  const u64 step_pages = uses.size() / std::max(uses.steps(), 1u) / geometry.rows_per_page;
  const u64 rate = std::bit_floor(std::max<u64>(std::min(most / sampled_lines, step_pages / least_pages), 1));
  const Sample sample(uses, geometry, rate, check);
  const double room = static_cast<double>(lines) * (rate > 1 ? margin : 1.0);
  u64 best = 0, capacity = most;
  for (int i = 0; i < tries && capacity > best; ++i) {
    const double needed = sample.lines_needed(capacity, ahead, options, workers, check);
    if (needed <= room) best = capacity;
    if (needed <= room && (capacity == most || needed >= room * (1 - close_enough))) break;
    // Needs grow more slowly than the capacity, as runs that are read ahead are part of them: this comes from above.
    capacity = std::min(most, static_cast<u64>(static_cast<double>(capacity) * room / std::max(needed, 1.0)));
  }
  return best ? best : std::min<u64>(capacity, most);
}

}  // namespace gids::packs
