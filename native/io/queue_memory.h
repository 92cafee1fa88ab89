// The memory of a queue pair: what host and GPU share, in one piece that can be registered with CUDA as a whole,
// and the posting side's private memory. Made by the owner of a queue (the GPU cache, or a test); knows
// the layout of gids/request_queue.h and nothing of who reads or writes it.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "gids/request_queue.h"

namespace gids::io {

struct QueueOptions {
  u64 staging_bytes = 256u << 20;  // divided by the rounds: round_max is the pages that fit
  u32 slot_bytes = 4096;           // the largest page; a multiple of the engine's alignment and of queue::slot_unit
  u32 rounds_max = 4;              // posted and not copied
  u64 spin_ns = 60'000'000'000;    // until a kernel that polls gives up; longer than the service's time-out
};

class QueueMemory {
 public:
  // Zeroed, committed as it is used, not inherited by forked children. std::invalid_argument for options that
  // leave no page for a round, or name what is out of range.
  explicit QueueMemory(const QueueOptions& options);

  u32 slot_bytes() const { return options_.slot_bytes; }
  u32 round_max() const { return round_max_; }
  const std::shared_ptr<std::byte>& shared() const { return shared_; }  // entries, doorbells, answers, staging
  u64 shared_bytes() const { return shared_bytes_; }
  u64 local_bytes() const { return local_bytes_; }  // what the posting side keeps

  // The pair as the host sees it: what the service takes (with no `local`), and host threads that play the blocks, with
  // zeroed memory of local_bytes().
  queue::Pair pair(std::byte* local) const;
  // The pair as a device sees it, by the device's addresses of shared() and of zeroed device memory of local_bytes().
  queue::Pair pair(u64 shared, u64 local) const;

 private:
  QueueOptions options_;
  u32 round_max_ = 0;
  u64 shared_bytes_ = 0, local_bytes_ = 0;
  std::shared_ptr<std::byte> shared_;
};

}  // namespace gids::io
