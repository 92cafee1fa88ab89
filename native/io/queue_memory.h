// The memory of queue pairs: what host and GPU share, in one piece that can be registered with CUDA as a whole,
// and the posting side's private memory. Made by the owner of a queue (the GPU cache, or a test); knows
// the layout of gids/request_queue.h and nothing of who reads or writes it.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "gids/request_queue.h"

namespace gids::io {

struct QueueOptions {
  static constexpr u32 pairs_max = 1024;
  u64 staging_bytes = 256u << 20;  // over all pairs; the depth is what fits, a power of two
  u32 slot_bytes = 4096;           // the largest page; a multiple of the engine's alignment and of queue::slot_unit
  u32 pairs = 1;
  u32 rounds_max = 2;            // of a pair, posted and not collected: round_max is depth / rounds_max
  u64 spin_ns = 60'000'000'000;  // until a lane that polls gives up; longer than the service's time-out
};

class QueueMemory {
 public:
  // Zeroed, committed as it is used, not inherited by forked children. std::invalid_argument for options that
  // leave no slot, or name what is out of range.
  explicit QueueMemory(const QueueOptions& options);

  u32 pairs() const { return options_.pairs; }
  u32 slot_bytes() const { return options_.slot_bytes; }
  u64 depth() const { return depth_; }                                  // slots of a pair
  const std::shared_ptr<std::byte>& shared() const { return shared_; }  // entries, doorbells, statuses, staging
  u64 shared_bytes() const { return shared_bytes_; }
  u64 local_bytes() const { return local_bytes_; }  // what the posting side keeps, of all pairs

  // Pair i as the host sees it: what the service takes (with no `local`), and host threads that play the warps, with
  // zeroed memory of local_bytes().
  queue::Pair pair(u32 i, std::byte* local) const;
  // Pair i as a device sees it, by the device's addresses of shared() and of zeroed device memory of local_bytes().
  queue::Pair pair(u32 i, u64 shared, u64 local) const;

 private:
  QueueOptions options_;
  u64 depth_ = 0, pair_bytes_ = 0, pair_local_bytes_ = 0;
  u64 shared_bytes_ = 0, local_bytes_ = 0;
  std::shared_ptr<std::byte> shared_;
};

}  // namespace gids::io
