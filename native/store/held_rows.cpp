#include "store/held_rows.h"

#include <bit>

namespace gids::store {

namespace {

constexpr size_t ahead = 16;  // how far to prefetch

}  // namespace

// One word more than needed, so that a set without ids also has ranks once it is sealed.
HeldRows::HeldRows(u64 id_count) : id_count_(id_count), words_(id_count / 64 + 1) {}

template <class Owner>
void HeldRows::add_owned(const Owner* owners, size_t n, u64 first, u32 part) noexcept {
  for (size_t i = 0; i < n; ++i) {
    const u64 id = first + i, held = owners[i] == part;
    words_[id / 64] |= held << (id % 64);
    size_ += held;
  }
}
template void HeldRows::add_owned<u8>(const u8*, size_t, u64, u32) noexcept;
template void HeldRows::add_owned<u16>(const u16*, size_t, u64, u32) noexcept;

template <class Id>
size_t HeldRows::add(const Id* ids, size_t n) noexcept {
  for (size_t i = 0; i < n; ++i) {
    const u64 id = static_cast<u64>(static_cast<i64>(ids[i]));
    if (id >= id_count_) return i;
    u64& word = words_[id / 64];
    const u64 bit = u64{1} << (id % 64);
    if (word & bit) return i;
    word |= bit;
    ++size_;
  }
  return n;
}
template size_t HeldRows::add<int>(const int*, size_t) noexcept;
template size_t HeldRows::add<i64>(const i64*, size_t) noexcept;

bool HeldRows::seal() {
  if (size_ >> 32) return false;
  ranks_.resize(words_.size());
  u32 below = 0;
  for (size_t w = 0; w < words_.size(); ++w) {
    ranks_[w] = below;
    below += static_cast<u32>(std::popcount(words_[w]));
  }
  return true;
}

size_t HeldRows::positions_of(const i64* ids, size_t n, i64* out) const noexcept {
  const RankedRows rows = ranked();
  for (size_t i = 0; i < n; ++i) {
    if (i + ahead < n && static_cast<u64>(ids[i + ahead]) < id_count_) {
      __builtin_prefetch(&words_[static_cast<u64>(ids[i + ahead]) / 64]);
      __builtin_prefetch(&ranks_[static_cast<u64>(ids[i + ahead]) / 64]);
    }
    const u64 id = static_cast<u64>(ids[i]);
    if (id >= id_count_ || !rows.contains(id)) return i;
    out[i] = static_cast<i64>(rows.rank(id));
  }
  return n;
}

void HeldRows::ids(i64* out) const noexcept {
  for (u64 w = 0; w < words_.size(); ++w)
    for (u64 word = words_[w]; word; word &= word - 1)
      *out++ = static_cast<i64>(w * 64 + static_cast<u64>(std::countr_zero(word)));
}

}  // namespace gids::store
