#include "packs/cutter.h"

#include <algorithm>

namespace gids::packs {

Cutter::Cutter(std::vector<Space> spaces, u64 pack_bytes) : spaces_(std::move(spaces)), pack_bytes_(pack_bytes) {
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
    for (size_t s = 0; s < spaces_.size(); ++s) pack.rows.push_back(current_[s].size() - added[s].size());
    packs_.push_back(std::move(pack));
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

std::vector<Cutter::Pack> Cutter::packs() const {
  std::vector<Pack> found = packs_;
  if (minibatches_ > first_) {
    found.push_back({minibatches_, {}});
    for (const RowSet& rows : current_) found.back().rows.push_back(rows.size());
  }
  return found;
}

}  // namespace gids::packs
