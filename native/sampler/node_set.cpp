#include "sampler/node_set.h"

#include <bit>
#include <cstring>
#include <stdexcept>

namespace gids::sampler {

namespace {

constexpr size_t ids_ahead = 16;      // slots fetched while another is looked at
constexpr size_t piece = 1 << 13;     // ids that one thread takes at a time
constexpr u32 threads_worth_it = 3;   // three passes by two threads take as long as one by one

void prefetch(const void* p) { __builtin_prefetch(p, 1, 3); }

}  // namespace

void NodeSet::start(std::span<const i64> seeds) {
  count_ = 0;
  nodes_.ensure(seeds.size());
  if (slots_.size()) std::memset(slots_.data(), 0xFF, slots_.bytes());
  reserve(seeds.size());
  for (const i64 seed : seeds) {
    id_map::note(slots_.data(), log2_slots_, static_cast<u64>(seed), count_);
    nodes_.data()[count_++] = seed;
  }
}

void NodeSet::relabel(i64* ids, size_t n, cache::Workers& workers) {
  if (count_ + n >= id_map::max_ids)
    throw std::length_error("one minibatch samples 2^32 edges or more: use fewer seeds or smaller fanouts");
  if (workers.threads() >= threads_worth_it && n > piece)
    relabel_at_once(ids, n, workers);
  else
    relabel_in_turn(ids, n);
}

void NodeSet::relabel_in_turn(i64* ids, size_t n) {
  for (size_t begin = 0; begin < n; begin += piece) {
    const size_t end = std::min(n, begin + piece);
    reserve(count_ + (end - begin));
    i64* nodes = nodes_.ensure(count_ + (end - begin), count_);
    u64* slots = slots_.data();
    const u32 log2_slots = log2_slots_;
    for (size_t i = begin; i < end; ++i) {
      if (i + ids_ahead < end) prefetch(&slots[id_map::home(static_cast<u64>(ids[i + ids_ahead]), log2_slots)]);
      const u64 id = static_cast<u64>(ids[i]);
      u32 slot = id_map::home(id, log2_slots);
      while (slots[slot] != id_map::empty && id_map::id_of(slots[slot]) != id) slot = id_map::next(slot, log2_slots);
      if (slots[slot] == id_map::empty) {
        slots[slot] = id_map::word(id, count_);
        nodes[count_++] = ids[i];
      }
      ids[i] = static_cast<i64>(id_map::at_of(slots[slot]));
    }
  }
}

// Each id is noted at its position after all known nodes. Ids whose own position is kept are new.
void NodeSet::relabel_at_once(i64* ids, size_t n, cache::Workers& workers) {
  reserve(count_ + n);
  u64* slots = slots_.data();
  const u32 log2_slots = log2_slots_;
  const u64 known = count_;
  u32* slot_of = slot_of_.ensure(n);
  u8* first = first_.ensure(n);
  u64* new_nodes = new_nodes_.ensure(div_ceil(n, piece) + 1);
  i64* nodes = nodes_.ensure(count_ + n, count_);
  workers.parallel_for(n, piece, [&](size_t begin, size_t end, u32) {
    for (size_t i = begin; i < end; ++i) {
      if (i + ids_ahead < end) prefetch(&slots[id_map::home(static_cast<u64>(ids[i + ids_ahead]), log2_slots)]);
      slot_of[i] = id_map::note(slots, log2_slots, static_cast<u64>(ids[i]), known + i);
    }
  });
  workers.parallel_for(n, piece, [&](size_t begin, size_t end, u32) {
    u64 found = 0;
    for (size_t i = begin; i < end; ++i) {
      first[i] = id_map::at_of(slots[slot_of[i]]) == known + i;
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
      nodes[at] = ids[i];
      slots[slot_of[i]] = id_map::word(static_cast<u64>(ids[i]), at++);
    }
  });
  workers.parallel_for(n, piece, [&](size_t begin, size_t end, u32) {
    for (size_t i = begin; i < end; ++i) ids[i] = static_cast<i64>(id_map::at_of(slots[slot_of[i]]));
  });
  count_ = total;
}

// At most three of four slots are taken.
void NodeSet::reserve(size_t count) {
  const size_t wanted = std::bit_ceil(std::max<size_t>(1024, count + count / 3 + 1));
  if (wanted <= slots_.size()) return;
  slots_ = HugeArray<u64>(wanted);
  std::memset(slots_.data(), 0xFF, slots_.bytes());
  log2_slots_ = static_cast<u32>(std::countr_zero(wanted));
  for (size_t i = 0; i < count_; ++i)
    id_map::note(slots_.data(), log2_slots_, static_cast<u64>(nodes_.data()[i]), i);
}

}  // namespace gids::sampler
