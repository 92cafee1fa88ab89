// The bounce pool: one slot per request in flight, for reads that cannot land in their destination; and staging, a few
// long slots for merged reads. Called by the engines. Its pages are committed when first used, and a forked child does
// not get them.
#pragma once

#include <cstddef>
#include <new>

#include <sys/mman.h>

#include "gids/target.h"

namespace gids::io {

class BouncePool {
 public:
  // huge: on huge pages. A disk reads into few physical segments at more than twice the rate of many.
  BouncePool(u32 slots, u32 slot_bytes, bool huge = false)
      : slot_bytes_(slot_bytes),
        bytes_(huge ? align_up(u64{slots} * slot_bytes, huge_bytes) : u64{slots} * slot_bytes),
        mapped_bytes_(bytes_ + (huge ? huge_bytes : 0)) {
    mapped_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped_ == MAP_FAILED) throw std::bad_alloc();
    madvise(mapped_, mapped_bytes_, MADV_DONTFORK);
    base_ = static_cast<std::byte*>(mapped_);
    if (!huge) return;
    base_ += align_up(reinterpret_cast<u64>(mapped_), huge_bytes) - reinterpret_cast<u64>(mapped_);
    madvise(base_, bytes_, MADV_HUGEPAGE);  // a hint
  }
  ~BouncePool() { munmap(mapped_, mapped_bytes_); }
  BouncePool(const BouncePool&) = delete;
  BouncePool& operator=(const BouncePool&) = delete;

  std::byte* slot(u32 i) const { return base_ + u64{i} * slot_bytes_; }
  std::byte* base() const { return base_; }
  u64 bytes() const { return bytes_; }

 private:
  static constexpr u64 huge_bytes = 2u << 20;

  u32 slot_bytes_;
  u64 bytes_, mapped_bytes_;
  void* mapped_ = nullptr;
  std::byte* base_ = nullptr;
};

}  // namespace gids::io
