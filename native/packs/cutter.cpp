#include "packs/cutter.h"

#include <algorithm>
#include <utility>

namespace gids::packs {

Cutter::Cutter(std::vector<Space> spaces, u64 pack_bytes, u64 lists_bytes)
    : spaces_(std::move(spaces)), pack_bytes_(pack_bytes), lists_bytes_(lists_bytes) {
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
    Pack pack{minibatches_, {}};
    for (size_t s = 0; s < spaces_.size(); ++s) {
      for (const u32 row : added[s]) current_[s].erase(row);
      pack.rows.push_back(current_[s].size());
    }
    packs_.push_back(std::move(pack));
    list();
    first_ = minibatches_;
    added_bytes = 0;
    for (size_t s = 0; s < spaces_.size(); ++s) {
      current_[s].clear();
      for (const u32 row : rows[s])
        if (!spaces_[s].resident->contains(row)) current_[s].insert(row);
      added_bytes += current_[s].size() * spaces_[s].row_bytes;
    }
    current_bytes_ = 0;
  }
  current_bytes_ += added_bytes;
  ++minibatches_;
  // Of a minibatch that is not the first of its pack, only what it adds is known: enough, since it fits.
  largest_bytes_ = std::max(largest_bytes_, added_bytes);
}

// The rows of the pack that is complete.
void Cutter::list() {
  if (lists_bytes_ == 0) return;
  Lists lists;
  u64 bytes = 0;
  for (const RowSet& rows : current_) bytes += lists.emplace_back(std::make_shared<RowList>(rows))->bytes();
  lists_.push_back(std::move(lists));
  lists_bytes_ -= std::min(lists_bytes_, bytes);
}

std::vector<Cutter::Lists> Cutter::take_lists() {
  if (minibatches_ > first_ && lists_.size() == packs_.size()) list();
  lists_bytes_ = 0;
  return std::exchange(lists_, {});
}

std::vector<Cutter::Pack> Cutter::packs() const {
  std::vector<Pack> found = packs_;
  if (minibatches_ > first_) {
    found.push_back({minibatches_, {}});
    for (const RowSet& rows : current_) found.back().rows.push_back(rows.size());
  }
  return found;
}

}  // namespace gids::packs
