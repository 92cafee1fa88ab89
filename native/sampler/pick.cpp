#include "sampler/pick.h"

#include <algorithm>
#include <vector>

#include "gids/mix.h"
#include "sampler/draws.h"

namespace gids::sampler {

namespace {

constexpr u32 small_fanout = 48;  // up to here a look at all earlier draws is cheaper than a hash set

// The offsets that one node has drawn.
class HashSet {
 public:
  explicit HashSet(u32 most) {
    size_t slots = 2;
    while (slots < 2 * size_t{most}) slots *= 2;
    slots_.assign(slots, none);
  }
  void clear() { std::fill(slots_.begin(), slots_.end(), none); }
  bool insert(u64 value) {
    size_t slot = mix(value) & (slots_.size() - 1);
    for (; slots_[slot] != none; slot = (slot + 1) & (slots_.size() - 1))
      if (slots_[slot] == value) return false;
    slots_[slot] = value;
    return true;
  }

 private:
  static constexpr u64 none = ~u64{0};
  std::vector<u64> slots_;
};

void pick_large(const Picks& picks, u64 key, u32 fanout) {
  HashSet drawn(fanout);
  for (u32 lane = 0; lane < picks.count; ++lane) {
    drawn.clear();
    for (u32 i = 0; i < fanout; ++i) {
      u64 offset = neighbor::candidate(random::draw(key, picks.node[lane], i), picks.degree[lane], fanout, i);
      if (!drawn.insert(offset)) drawn.insert(offset = neighbor::last_candidate(picks.degree[lane], fanout, i));
      picks.to[lane][i] = picks.begin[lane] + static_cast<i64>(offset);
    }
  }
}

}  // namespace

void pick(const Picks& picks, u64 key, u32 fanout) {
  if (fanout > small_fanout) return pick_large(picks, key, fanout);
  DrawPairs pairs[small_fanout / 2];
  for (u32 i = 0; i < fanout; i += 2) draw_pairs(picks.node, key, i / 2, pairs[i / 2]);
  for (u32 lane = 0; lane < picks.count; ++lane) {
    const u64 degree = picks.degree[lane];
    i64* to = picks.to[lane];
    for (u32 i = 0; i < fanout; ++i) {
      const u64 drawn = neighbor::candidate(pairs[i / 2][i % 2][lane], degree, fanout, i);
      const i64 at = picks.begin[lane] + static_cast<i64>(drawn);
      bool again = false;
      for (u32 earlier = 0; earlier < i; ++earlier) again |= to[earlier] == at;
      to[i] = again ? picks.begin[lane] + static_cast<i64>(neighbor::last_candidate(degree, fanout, i)) : at;
    }
  }
}

}  // namespace gids::sampler
