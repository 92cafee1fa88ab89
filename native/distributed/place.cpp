// Placement: a radix sort, then one walk over the hottest rows from both ends.
#include "distributed/place.h"

#include <algorithm>
#include <bit>
#include <memory>
#include <numeric>
#include <type_traits>
#include <vector>

namespace gids::distributed {

namespace {

constexpr unsigned digit_bits = 11;
constexpr size_t digits = size_t{1} << digit_bits;
constexpr size_t ahead = 16;  // how far to prefetch

template <class Heat> using Key = std::conditional_t<sizeof(Heat) == 4, u32, u64>;

// Ascending keys are falling heats: a float that is not negative compares like its bits.
template <class Heat> Key<Heat> key_of(Heat heat) { return ~std::bit_cast<Key<Heat>>(heat + Heat{0}); }

template <class Heat> struct [[gnu::packed]] Entry {
  Key<Heat> key;
  u32 row;
};
static_assert(sizeof(Entry<float>) == 8 && sizeof(Entry<double>) == 12, "no padding is moved");

// Devices by falling capacity. Row number r by heat starts on the first holding(r) of them.
struct Start {
  std::vector<u64> capacity;  // of each device, at most n
  std::vector<u32> device;
  size_t count = 0;

  Start(std::span<const u64> capacities, u64 n) : device(capacities.size()) {
    for (const u64 c : capacities) capacity.push_back(std::min(c, n));
    std::iota(device.begin(), device.end(), 0u);
    std::stable_sort(device.begin(), device.end(), [&](u32 a, u32 b) { return capacity[a] > capacity[b]; });
    count = capacities.size();
  }
  u64 capacity_at(size_t i) const { return i < count ? capacity[device[i]] : 0; }
};

}  // namespace

template <class Heat> void by_heat(const Heat* heat, size_t n, u32* rows) {
  constexpr unsigned passes = (sizeof(Heat) * 8 + digit_bits - 1) / digit_bits;
  std::vector<u64> counts(passes * digits);
  for (size_t v = 0; v < n; ++v) {
    const Key<Heat> key = key_of(heat[v]);
    for (unsigned p = 0; p < passes; ++p) ++counts[p * digits + ((key >> (p * digit_bits)) & (digits - 1))];
  }
  auto from = std::make_unique_for_overwrite<Entry<Heat>[]>(n);
  auto to = std::make_unique_for_overwrite<Entry<Heat>[]>(n);
  for (size_t v = 0; v < n; ++v) from[v] = {key_of(heat[v]), static_cast<u32>(v)};
  for (unsigned p = 0; p < passes; ++p) {
    u64* next = counts.data() + p * digits;
    if (std::find(next, next + digits, u64{n}) != next + digits) continue;  // all keys have the same digit
    std::exclusive_scan(next, next + digits, next, u64{0});
    for (size_t i = 0; i < n; ++i) to[next[(from[i].key >> (p * digit_bits)) & (digits - 1)]++] = from[i];
    from.swap(to);
  }
  for (size_t i = 0; i < n; ++i) rows[i] = from[i].row;
}

template <class Heat, class Mask>
u64 place(const u32* rows, const Heat* heat, size_t n, std::span<const u64> capacities, Worth worth, Mask* holders,
          std::span<double> gained) {
  const Start start(capacities, n);
  const auto bit = [](u32 device) { return static_cast<Mask>(Mask{1} << device); };
  std::fill(gained.begin(), gained.end(), 0.0);
  std::vector<u32> holding;          // the devices that hold the row whose copies go
  u64 fresh = start.capacity_at(0);  // the hottest row that no device holds
  u64 old = start.capacity_at(1);    // rows below, by heat, have every copy they started with, and 2 or more
  u64 exchanged = 0;
  for (size_t devices = 0; old > 0;) {
    const u64 row = old - 1;
    for (; devices < start.count && start.capacity_at(devices) > row; ++devices)
      holding.push_back(start.device[devices]);
    // Who gained least takes the next row; who gained most keeps its copy. Nearly sorted from the row before.
    for (size_t i = 1; i < holding.size(); ++i)
      for (size_t j = i; j && (gained[holding[j]] < gained[holding[j - 1]] ||
                               (gained[holding[j]] == gained[holding[j - 1]] && holding[j] < holding[j - 1]));
           --j)
        std::swap(holding[j], holding[j - 1]);
    if (row >= ahead) {
      __builtin_prefetch(heat + rows[row - ahead]);
      __builtin_prefetch(holders + rows[row - ahead], 1);
    }
    const double lost = worth.copy * static_cast<double>(heat[rows[row]]);
    Mask gone = 0;
    size_t copies = holding.size();
    for (size_t i = 0; i + 1 < holding.size() && fresh < n; ++i) {
      if (fresh + ahead < n) {
        __builtin_prefetch(heat + rows[fresh + ahead]);
        __builtin_prefetch(holders + rows[fresh + ahead], 1);
      }
      const double won = worth.first * static_cast<double>(heat[rows[fresh]]);
      if (!(won > lost)) break;
      holders[rows[fresh++]] = bit(holding[i]);
      gone |= bit(holding[i]);
      gained[holding[i]] += won - lost;
      ++exchanged;
      --copies;
    }
    Mask left = 0;
    for (const u32 device : holding) left |= bit(device);
    holders[rows[row]] = static_cast<Mask>(left & ~gone);
    --old;
    if (copies > 1) break;  // nothing colder is worth a copy of this row, nor of a hotter one
  }
  // The rows that were not looked at are as they started; colder ones than the last new row are nowhere.
  const auto write = [&](u64 begin, u64 end, Mask mask) {
    for (u64 r = begin; r < end; ++r) {
      if (r + ahead < end) __builtin_prefetch(holders + rows[r + ahead], 1);
      holders[rows[r]] = mask;
    }
  };
  Mask mask = 0;
  for (size_t i = 0; i < start.count; ++i) {
    mask |= bit(start.device[i]);
    const u64 begin = start.capacity_at(i + 1), end = start.capacity_at(i);
    if (i == 0) write(begin, end, mask);
    else write(begin, std::min(end, old), mask);
  }
  write(fresh, n, 0);
  return exchanged;
}

template void by_heat<float>(const float*, size_t, u32*);
template void by_heat<double>(const double*, size_t, u32*);

#define GIDS_PLACE(Heat, Mask)                                                                        \
  template u64 place<Heat, Mask>(const u32*, const Heat*, size_t, std::span<const u64>, Worth, Mask*, \
                                 std::span<double>);
GIDS_PLACE(float, u8)
GIDS_PLACE(float, u16)
GIDS_PLACE(float, u32)
GIDS_PLACE(float, u64)
GIDS_PLACE(double, u8)
GIDS_PLACE(double, u16)
GIDS_PLACE(double, u32)
GIDS_PLACE(double, u64)
#undef GIDS_PLACE

}  // namespace gids::distributed
