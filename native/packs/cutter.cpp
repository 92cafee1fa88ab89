#include "packs/cutter.h"

#include <algorithm>
#include <utility>

namespace gids::packs {

namespace {

std::vector<u64> sizes_of(const std::vector<RowSet>& sets) {
  std::vector<u64> sizes;
  for (const RowSet& rows : sets) sizes.push_back(rows.size());
  return sizes;
}

}  // namespace

Cutter::Cutter(std::vector<Space> spaces, u64 pack_bytes, u64 lists_bytes, bool parts)
    : spaces_(std::move(spaces)), pack_bytes_(pack_bytes), lists_bytes_(lists_bytes), parts_(parts) {
  for (const Space& space : spaces_) current_.emplace_back(space.resident->row_count());
}

void Cutter::add(std::span<const std::span<const u32>> rows) {
  std::vector<std::vector<u32>> added(spaces_.size());  // rows that only this minibatch brings into the pack
  u64 added_bytes = 0;
  for (size_t s = 0; s < spaces_.size(); ++s) {
    const Space& space = spaces_[s];
    added[s].reserve(rows[s].size());
    for (const u32 row : rows[s])
      if (!space.resident->contains(row) && current_[s].insert(row)) added[s].push_back(row);
    added_bytes += added[s].size() * space.row_bytes;
  }
  if (minibatches_ > first_ && current_bytes_ + added_bytes > pack_bytes_) {
    for (size_t s = 0; s < spaces_.size(); ++s)
      for (const u32 row : added[s]) current_[s].erase(row);
    add_pack(minibatches_, std::vector<u64>(spaces_.size()), sizes_of(current_));
    begin_pack();
    added_bytes = 0;
    for (size_t s = 0; s < spaces_.size(); ++s) {
      for (const u32 row : rows[s])
        if (!spaces_[s].resident->contains(row)) current_[s].insert(row);
      added_bytes += current_[s].size() * spaces_[s].row_bytes;
    }
  }
  current_bytes_ += added_bytes;
  ++minibatches_;
  // Of a minibatch that is not the first of its pack, only what it adds is known: enough, since it fits.
  largest_bytes_ = std::max(largest_bytes_, added_bytes);
  if (parts_ && current_bytes_ > pack_bytes_) split();
}

// The rows of one minibatch as several packs of about the same size: those of the first space first, ascending.
void Cutter::split() {
  const u64 parts = div_ceil(current_bytes_, std::max<u64>(1, pack_bytes_));
  const u64 part_bytes = div_ceil(current_bytes_, parts);
  const std::vector<u64> all = sizes_of(current_);
  std::vector<u64> packed(spaces_.size());
  for (size_t s = 0; s < spaces_.size();) {
    const std::vector<u64> skipped = packed;
    std::vector<u64> rows(spaces_.size());
    u64 bytes = 0;
    for (; s < spaces_.size(); ++s) {
      const u64 each = spaces_[s].row_bytes, left = pack_bytes_ - std::min(pack_bytes_, bytes);
      u64 fit = std::min(left / each, div_ceil(part_bytes - std::min(part_bytes, bytes), each));
      if (bytes == 0) fit = std::max<u64>(1, fit);
      rows[s] = std::min(fit, all[s] - packed[s]);
      packed[s] += rows[s];
      bytes += rows[s] * each;
      if (packed[s] < all[s]) break;
    }
    add_pack(minibatches_, skipped, rows);
  }
  begin_pack();
}

// A pack of the next `rows` rows of each space after the skipped ones.
void Cutter::add_pack(u64 end, const std::vector<u64>& skipped, std::vector<u64> rows) {
  if (lists_bytes_ > 0) {
    Lists lists;
    u64 bytes = 0;
    for (size_t s = 0; s < spaces_.size(); ++s)
      bytes += lists.emplace_back(std::make_shared<RowList>(current_[s], skipped[s], rows[s]))->bytes();
    if (bytes <= lists_bytes_) lists_.push_back(std::move(lists));
    lists_bytes_ -= std::min(lists_bytes_, bytes);
  }
  packs_.push_back({end, std::move(rows)});
}

void Cutter::begin_pack() {
  for (RowSet& rows : current_) rows.clear();
  first_ = minibatches_;
  current_bytes_ = 0;
}

std::vector<Cutter::Lists> Cutter::take_lists() {
  if (minibatches_ > first_) {
    add_pack(minibatches_, std::vector<u64>(spaces_.size()), sizes_of(current_));
    begin_pack();
  }
  lists_bytes_ = 0;
  return std::exchange(lists_, {});
}

std::vector<Cutter::Pack> Cutter::packs() const {
  std::vector<Pack> packs = packs_;
  if (minibatches_ > first_) packs.push_back({minibatches_, sizes_of(current_)});
  return packs;
}

}  // namespace gids::packs
