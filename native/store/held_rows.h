// The ids of the rows that a part of a dataset holds, as a bitmap. A row's position in the part's table is its rank:
// the number of held ids below it. Called by bind/; knows numbers only.
#pragma once

#include <cstddef>
#include <vector>

#include "store/row_rank.h"
#include "gids/target.h"

namespace gids::store {

// Filled by add_owned() or add(), then sealed: only then are there positions. An id takes 1.5 bits.
class HeldRows {
 public:
  // Ids are in [0, id_count).
  explicit HeldRows(u64 id_count);

  u64 id_count() const { return id_count_; }
  u64 size() const { return size_; }
  size_t bytes() const { return words_.size() * sizeof(u64) + ranks_.size() * sizeof(u32); }

  // Adds the ids first + i with owners[i] == part, i < n. The ids are not in the set yet.
  template <class Owner>
  void add_owned(const Owner* owners, size_t n, u64 first, u32 part) noexcept;

  // Adds ids. Returns n, or the first i whose id is out of range or in the set already.
  template <class Id>
  size_t add(const Id* ids, size_t n) noexcept;

  // Returns false if the set has 2^32 ids or more, which ranks cannot number.
  bool seal();
  bool sealed() const { return !ranks_.empty(); }

  // out[i] = the position of ids[i]. Returns n, or the first i whose id is not held or out of range. Sealed.
  size_t positions_of(const i64* ids, size_t n, i64* out) const noexcept;

  // Writes the ids, ascending, to out[size()].
  void ids(i64* out) const noexcept;

 private:
  RankedRows ranked() const { return {words_.data(), ranks_.data()}; }

  u64 id_count_;
  u64 size_ = 0;
  std::vector<u64> words_;
  std::vector<u32> ranks_;  // ids in the words before each word
};

}  // namespace gids::store
