#include "sampler/node_set.h"

#include <bit>
#include <cstring>
#include <stdexcept>

#include "gids/pair_map.h"

namespace gids::sampler {

namespace {

constexpr size_t ids_ahead = 16;     // slots fetched while another is looked at
constexpr size_t piece = 1 << 13;    // ids that one thread takes at a time
constexpr u32 threads_worth_it = 3;  // three passes by two threads take as long as one by one

void prefetch(const void* p) { __builtin_prefetch(p, 1, 3); }

// A table of id_map.h, or of pair_map.h. Both are filled with ones while they are empty.
template <bool in_trees>
struct Slots {
  static constexpr u32 words = in_trees ? pair_map::slot_words : 1;
  u64* slots;
  u32 log2_slots;

  static u64 key(u64 id, u64 tree) { return in_trees ? pair_map::key(tree, id) : id; }
  static u64 key(const i64* ids, const u32* trees, size_t i) {
    return key(static_cast<u64>(ids[i]), in_trees ? trees[i] : 0);
  }
  u32 home(u64 key) const { return home_slot(key, log2_slots); }
  void fetch(u64 key) const { prefetch(&slots[words * u64{home(key)}]); }
  u64 word(u32 slot) const { return slots[words * u64{slot}]; }
  bool is_empty(u32 slot) const { return word(slot) == id_map::empty; }
  // The slot that holds the key, or the empty one where it belongs.
  u32 find(u64 key) const {
    u32 slot = home(key);
    while (!is_empty(slot) && (in_trees ? word(slot) : id_map::id_of(word(slot))) != key)
      slot = id_map::next(slot, log2_slots);
    return slot;
  }
  u64 at(u32 slot) const { return in_trees ? slots[words * u64{slot} + 1] : id_map::at_of(word(slot)); }
  void set(u32 slot, u64 key, u64 at) const {
    slots[words * u64{slot}] = in_trees ? key : id_map::word(key, at);
    if (in_trees) slots[words * u64{slot} + 1] = at;
  }
  u32 note(u64 key, u64 at) const {
    return in_trees ? pair_map::note(slots, log2_slots, key, at) : id_map::note(slots, log2_slots, key, at);
  }
};
static_assert(id_map::empty == pair_map::empty && id_map::empty == ~u64{0}, "memset of 0xFF empties both tables");

}  // namespace

template <bool in_trees>
void BasicNodeSet<in_trees>::start(std::span<const i64> seeds, const i64* trees) {
  count_ = 0;
  make_room(seeds.size());
  if (slots_.size()) std::memset(slots_.data(), 0xFF, slots_.bytes());
  reserve(seeds.size());
  const Slots<in_trees> table{slots_.data(), log2_slots_};
  for (const i64 seed : seeds) {
    const u64 tree = in_trees ? static_cast<u64>(trees[count_]) : 0;
    table.note(table.key(static_cast<u64>(seed), tree), count_);
    add(seed, tree, count_);
    ++count_;
  }
}

template <bool in_trees>
void BasicNodeSet<in_trees>::relabel(i64* ids, size_t n, cache::Workers& workers, const u32* trees) {
  if (count_ + n >= id_map::max_ids)
    throw std::length_error("one minibatch samples 2^32 edges or more: use fewer seeds or smaller fanouts");
  if (workers.threads() >= threads_worth_it && n > piece) relabel_at_once(ids, trees, n, workers);
  else relabel_in_turn(ids, trees, n);
}

template <bool in_trees>
void BasicNodeSet<in_trees>::relabel_in_turn(i64* ids, const u32* trees, size_t n) {
  for (size_t begin = 0; begin < n; begin += piece) {
    const size_t end = std::min(n, begin + piece);
    reserve(count_ + (end - begin));
    make_room(count_ + (end - begin));
    const Slots<in_trees> table{slots_.data(), log2_slots_};
    for (size_t i = begin; i < end; ++i) {
      if (i + ids_ahead < end) table.fetch(table.key(ids, trees, i + ids_ahead));
      const u64 key = table.key(ids, trees, i);
      const u32 slot = table.find(key);
      if (table.is_empty(slot)) {
        table.set(slot, key, count_);
        add(ids[i], in_trees ? trees[i] : 0, count_);
        ++count_;
      }
      ids[i] = static_cast<i64>(table.at(slot));
    }
  }
}

// Each id is noted at its position after all known nodes. Ids whose own position is kept are new.
template <bool in_trees>
void BasicNodeSet<in_trees>::relabel_at_once(i64* ids, const u32* trees, size_t n, cache::Workers& workers) {
  reserve(count_ + n);
  const Slots<in_trees> table{slots_.data(), log2_slots_};
  const u64 known = count_;
  u32* slot_of = slot_of_.ensure(n);
  u8* first = first_.ensure(n);
  u64* new_nodes = new_nodes_.ensure(div_ceil(n, piece) + 1);
  make_room(count_ + n);
  workers.parallel_for(n, piece, [&](size_t begin, size_t end, u32) {
    for (size_t i = begin; i < end; ++i) {
      if (i + ids_ahead < end) table.fetch(table.key(ids, trees, i + ids_ahead));
      slot_of[i] = table.note(table.key(ids, trees, i), known + i);
    }
  });
  workers.parallel_for(n, piece, [&](size_t begin, size_t end, u32) {
    u64 found = 0;
    for (size_t i = begin; i < end; ++i) {
      first[i] = table.at(slot_of[i]) == known + i;
      found += first[i];
    }
    new_nodes[begin / piece] = found;
  });
  u64 total = known;
  for (size_t p = 0; p < div_ceil(n, piece); ++p) {
    const u64 found = new_nodes[p];
    new_nodes[p] = total;
    total += found;
  }
  workers.parallel_for(n, piece, [&](size_t begin, size_t end, u32) {
    u64 at = new_nodes[begin / piece];
    for (size_t i = begin; i < end; ++i) {
      if (!first[i]) continue;
      add(ids[i], in_trees ? trees[i] : 0, at);
      table.set(slot_of[i], table.key(ids, trees, i), at++);
    }
  });
  workers.parallel_for(n, piece, [&](size_t begin, size_t end, u32) {
    for (size_t i = begin; i < end; ++i) ids[i] = static_cast<i64>(table.at(slot_of[i]));
  });
  count_ = total;
}

template <bool in_trees>
u64 BasicNodeSet<in_trees>::find(u64 id, u64 tree) const {
  const Slots<in_trees> table{const_cast<u64*>(slots_.data()), log2_slots_};
  const u32 slot = table.find(table.key(id, tree));
  return table.is_empty(slot) ? none : table.at(slot);
}

template <bool in_trees>
void BasicNodeSet<in_trees>::add(i64 id, u64 tree, size_t at) {
  nodes_.data()[at] = id;
  if (in_trees) trees_.data()[at] = static_cast<u32>(tree);
}

template <bool in_trees>
void BasicNodeSet<in_trees>::make_room(size_t count) {
  nodes_.ensure(count, count_);
  if (in_trees) trees_.ensure(count, count_);
}

// At most three of four slots are taken.
template <bool in_trees>
void BasicNodeSet<in_trees>::reserve(size_t count) {
  const size_t wanted = std::bit_ceil(std::max<size_t>(1024, count + count / 3 + 1));
  if (wanted * Slots<in_trees>::words <= slots_.size()) return;
  slots_ = HugeArray<u64>(wanted * Slots<in_trees>::words);
  std::memset(slots_.data(), 0xFF, slots_.bytes());
  log2_slots_ = static_cast<u32>(std::countr_zero(wanted));
  const Slots<in_trees> table{slots_.data(), log2_slots_};
  for (size_t i = 0; i < count_; ++i) table.note(table.key(nodes_.data(), trees_.data(), i), i);
}

template class BasicNodeSet<false>;
template class BasicNodeSet<true>;

}  // namespace gids::sampler
