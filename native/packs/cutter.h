// Cuts a superbatch into packs: runs of minibatches whose distinct rows fit into the memory of a pack. A minibatch that
// does not fit is cut into several packs, if that is allowed. Called for each share of resident rows that is
// considered; for the best one, it also lists the rows of each pack. Knows numbers only.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "packs/row_list.h"

namespace gids::packs {

// Tables that a minibatch reads by the same rows. row_bytes: of all of them together.
struct Space {
  std::shared_ptr<const RowSet> resident;  // rows that are in no pack
  u64 row_bytes;
};

class Cutter {
 public:
  struct Pack {
    u64 end;                // the minibatch after its last one; the same for all parts of one minibatch
    std::vector<u64> rows;  // distinct rows of each space
  };
  using Lists = std::vector<std::shared_ptr<RowList>>;  // of each space

  // lists_bytes: the first packs get row lists, which take at most so many bytes. parts: a minibatch may be cut.
  Cutter(std::vector<Space> spaces, u64 pack_bytes, u64 lists_bytes, bool parts);

  // The next minibatch's rows of each space, below its table's number of rows.
  void add(std::span<const std::span<const u32>> rows);

  size_t space_count() const { return spaces_.size(); }
  // Those that are complete, and the last one.
  std::vector<Pack> packs() const;
  // Those of the first packs. The cutter has none afterwards; call it after the last minibatch.
  std::vector<Lists> take_lists();
  // Bytes of the rows of the largest minibatch that are not resident; more than pack_bytes: it does not fit in a pack.
  u64 largest_bytes() const { return largest_bytes_; }

 private:
  void add_pack(u64 end, const std::vector<u64>& skipped, std::vector<u64> rows);
  void split();
  void begin_pack();

  std::vector<Space> spaces_;
  u64 pack_bytes_, lists_bytes_;
  bool parts_;
  std::vector<RowSet> current_;  // rows of the pack that is being filled, by space
  u64 current_bytes_ = 0;
  u64 minibatches_ = 0, first_ = 0;  // of the pack that is being filled
  u64 largest_bytes_ = 0;
  std::vector<Pack> packs_;
  std::vector<Lists> lists_;
};

}  // namespace gids::packs
