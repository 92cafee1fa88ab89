// The bounce pool: one slot per request in flight, for reads that cannot land in their destination.
// Called by the engines. Its pages are committed when first used, and a forked child does not get them.
#pragma once

#include <cstddef>
#include <new>

#include <sys/mman.h>

#include "gids/target.h"

namespace gids::io {

class BouncePool {
 public:
  BouncePool(u32 slots, u32 slot_bytes) : slot_bytes_(slot_bytes), bytes_(u64{slots} * slot_bytes) {
    void* m = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m == MAP_FAILED) throw std::bad_alloc();
    madvise(m, bytes_, MADV_DONTFORK);
    base_ = static_cast<std::byte*>(m);
  }
  ~BouncePool() { munmap(base_, bytes_); }
  BouncePool(const BouncePool&) = delete;
  BouncePool& operator=(const BouncePool&) = delete;

  std::byte* slot(u32 i) const { return base_ + u64{i} * slot_bytes_; }
  std::byte* base() const { return base_; }
  u64 bytes() const { return bytes_; }

 private:
  u32 slot_bytes_;
  u64 bytes_;
  std::byte* base_ = nullptr;
};

}  // namespace gids::io
