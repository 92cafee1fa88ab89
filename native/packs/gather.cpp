#include "packs/gather.h"

#include <algorithm>
#include <array>
#include <atomic>

#include "cache/copy.h"

namespace gids::packs {

std::tuple<u64, bool> gather(cache::Workers& workers, std::span<const u32> ids, std::span<const Holder> holders,
                             const cache::RowForm& form, std::byte* out) {
  constexpr size_t block = 64, piece_bytes = 512 << 10;
  const size_t out_bytes = form.out_row_bytes();
  const bool streaming = ids.size() * out_bytes >= cache::streaming_bytes;
  const size_t grain = align_up(std::max<size_t>(1, piece_bytes / std::max<size_t>(1, out_bytes)), block);
  std::atomic<u64> missing{0};
  std::atomic<bool> overflowed{false};
  workers.parallel_for(ids.size(), grain, [&](size_t begin, size_t end, u32) {
    std::array<const std::byte*, block> from;
    std::array<std::byte*, block> to;
    u64 absent = 0;
    for (size_t first = begin; first < end; first += block) {
      const size_t last = std::min(end, first + block);
      for (size_t i = last; i < std::min(end, last + block); ++i)  // of the next block
        for (const Holder& holder : holders) holder.rows->prefetch(ids[i]);
      size_t n = 0;
      for (size_t i = first; i < last; ++i) {
        const auto holder =
            std::find_if(holders.begin(), holders.end(), [&](const Holder& h) { return h.rows->contains(ids[i]); });
        if (holder == holders.end()) {
          ++absent;
          continue;
        }
        from[n] = holder->memory + holder->rows->rank(ids[i]) * form.row_bytes;
        to[n++] = out + i * out_bytes;
      }
      if (cache::convert_rows(form, from.data(), to.data(), n, streaming))
        overflowed.store(true, std::memory_order_relaxed);
    }
    if (absent) missing.fetch_add(absent, std::memory_order_relaxed);
  });
  return {missing.load(std::memory_order_relaxed), overflowed.load(std::memory_order_relaxed)};
}

}  // namespace gids::packs
