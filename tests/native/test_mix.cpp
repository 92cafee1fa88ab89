// sources:
// Hash tables of ids, nodes of trees and pages: how many slots a search looks at, by the pattern of what they hold.
#include "gids/mix.h"

#include <random>
#include <vector>

#include "check.h"
#include "gids/id_map.h"
#include "gids/page_set.h"
#include "gids/pair_map.h"

using namespace gids;

namespace {

// Slots that inserting ids looks at in tables of 2^16 slots; at most three of four are taken.
constexpr u32 log2_slots = 16, mask = (1 << log2_slots) - 1;
constexpr size_t ids_in_table = 3 << (log2_slots - 2);

u64 probes_of_ids(const std::vector<u64>& ids) {
  std::vector<u64> slots(mask + 1, id_map::empty);
  u64 probes = 0;
  for (const u64 id : ids)
    probes += 1 + ((id_map::note(slots.data(), log2_slots, id, 0) - home_slot(id, log2_slots)) & mask);
  return probes;
}

u64 probes_of_pairs(const std::vector<u64>& ids) {
  std::vector<u64> slots(pair_map::slot_words * (mask + 1), pair_map::empty);
  u64 probes = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const u64 key = pair_map::key(i % 3, ids[i]);
    probes += 1 + ((pair_map::note(slots.data(), log2_slots, key, 0) - home_slot(key, log2_slots)) & mask);
  }
  return probes;
}

// Half of the pages: more than half of the cells stay empty.
u64 probes_of_pages(const std::vector<u64>& pages) {
  std::vector<u64> keys(mask + 1);
  const PageSet set{keys.data(), nullptr, mask};
  u64 probes = 0, cell = 0;
  for (size_t i = 0; i < pages.size(); i += 2) {
    set.insert(pages[i], cell);
    probes += 1 + ((cell - mix(pages[i])) & mask);
  }
  return probes;
}

template <class Taken>
std::vector<u64> first_ids(Taken is_taken) {
  std::vector<u64> ids;
  for (u64 id = 0; ids.size() < ids_in_table; ++id)
    if (is_taken(id)) ids.push_back(id);
  return ids;
}

void test_ids_with_a_pattern_cost_no_more_probes_than_random_ids() {
  std::mt19937_64 rng(5);
  std::vector<u64> random;
  for (size_t i = 0; i < ids_in_table; ++i) random.push_back(rng() % id_map::max_ids);
  const u64 ids = probes_of_ids(random), pairs = probes_of_pairs(random), pages = probes_of_pages(random);
  CHECK(ids < 4 * ids_in_table);
  const auto check = [&](const std::vector<u64>& patterned) {
    CHECK(2 * probes_of_ids(patterned) < 3 * ids);
    CHECK(2 * probes_of_pairs(patterned) < 3 * pairs);
    CHECK(2 * probes_of_pages(patterned) < 3 * pages);
  };
  for (const u64 ranks : {2, 4, 16}) {
    for (const u64 rank : {u64{0}, ranks / 2, ranks - 1}) {
      for (const u64 block : {1, 8})  // hash_owners() and range_owners() of gids/distributed/owners.py
        check(first_ids([&](u64 id) {
          return ((id / block * 0x9E3779B97F4A7C15ull >> 32) * ranks >> 32) == rank;
        }));
      check(first_ids([&](u64 id) { return id >= rank * 1'000'000; }));
      check(first_ids([&](u64 id) { return id / 4096 % ranks == rank; }));  // communities
      // Owners of `gids partition --by hash`.
      check(first_ids([&](u64 id) {
        constexpr u64 step = 0x9E3779B97F4A7C15ull;
        return ((mix((mix(id + step) ^ 12345) + step) >> 32) * ranks >> 32) == rank;
      }));
    }
  }
  // Powers of two, numbers whose multiples of the golden ratio are nearly whole, and a stride of rows in pages.
  for (const u64 stride : {2, 8, 64, 4096, 1 << 14, 3, 89, 987, 10946, 46368, 1000}) {
    std::vector<u64> strided;
    for (u64 i = 0; i < ids_in_table; ++i) strided.push_back(i * stride);
    check(strided);
  }
}

}  // namespace

int main() { test_ids_with_a_pattern_cost_no_more_probes_than_random_ids(); }
