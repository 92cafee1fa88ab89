// The rows of a pack that waits: ascending, as gaps of one byte or more. A tenth of a row set where the pack has few of
// the table's rows. Called by the sweep, which goes through it once; knows numbers only.
#pragma once

#include <cstddef>
#include <vector>

#include "packs/row_set.h"

namespace gids::packs {

class RowList {
 public:
  explicit RowList(const RowSet& rows) : RowList(rows, 0, rows.size()) {}
  // count of the rows, without the first skipped ones.
  RowList(const RowSet& rows, u64 skipped, u64 count) : row_count_(rows.row_count()), size_(count) {
    u64 next = 0, rank = 0;  // next: the row after the last one
    rows.each(0, row_count_, [&](u64 row) {
      if (rank < skipped || rank - skipped >= count) {
        ++rank;
        return;
      }
      ++rank;
      u64 gap = row - next;
      for (; gap >= 0x80; gap >>= 7) bytes_.push_back(static_cast<u8>(gap | 0x80));
      bytes_.push_back(static_cast<u8>(gap));
      next = row + 1;
    });
    bytes_.shrink_to_fit();
  }

  u64 row_count() const { return row_count_; }  // of the table
  u64 size() const { return size_; }
  size_t bytes() const { return bytes_.capacity(); }

  // Goes through the rows once.
  class Cursor {
   public:
    explicit Cursor(const RowList& list) : at_(list.bytes_.data()), end_(at_ + list.bytes_.size()) { advance(); }
    // The present row; end() after the last one.
    u64 row() const { return row_; }
    void advance() {
      if (at_ == end_) {
        row_ = end();
        return;
      }
      u64 gap = 0;
      for (u32 shift = 0;; shift += 7) {
        const u8 byte = *at_++;
        gap |= u64{byte & 0x7Fu} << shift;
        if (byte < 0x80) break;
      }
      row_ = next_ + gap;
      next_ = row_ + 1;
    }
    static constexpr u64 end() { return ~u64{0}; }

   private:
    const u8* at_;
    const u8* end_;
    u64 row_ = 0, next_ = 0;
  };

  void insert_into(RowSet& rows) const {
    for (Cursor c(*this); c.row() != Cursor::end(); c.advance()) rows.insert(static_cast<u32>(c.row()));
  }

 private:
  u64 row_count_, size_;
  std::vector<u8> bytes_;
};

}  // namespace gids::packs
