// An io_uring on raw system calls: submission and completion queues, nothing about reads. Called by the
// thread that owns it (uring.cpp), which must be the thread that constructs and destroys it.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>

#include <linux/io_uring.h>

#include "gids/target.h"

namespace gids::io {

class Ring {
 public:
  // Asks for the fastest set of features that the kernel has. Throws std::system_error that tells why
  // io_uring cannot be used.
  explicit Ring(u32 entries);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // A cleared entry. There must be room: as many as `entries` between two calls of enter().
  io_uring_sqe* push();
  u32 queued() const { return tail_ - submitted_; }
  // Takes back the newest entry that the kernel has not seen; queued() must not be 0.
  const io_uring_sqe& pop() { return sqes_[--tail_ & sq_mask_]; }
  // Submits what is queued and waits until `wait` completions are there. 0, or -errno (the entries that
  // were not submitted stay queued).
  int enter(u32 wait);

  // f(user_data, result) for every completion that is there; returns how many.
  template <class F>
  u32 reap(F&& f) {
    const u32 head = *cq_head_;
    const u32 tail = std::atomic_ref(*cq_tail_).load(std::memory_order_acquire);
    for (u32 i = head; i != tail; ++i) f(cqes_[i & cq_mask_].user_data, cqes_[i & cq_mask_].res);
    std::atomic_ref(*cq_head_).store(tail, std::memory_order_release);
    return tail - head;
  }

  bool register_files(const int* fds, u32 count);
  // A table of `count` empty buffers, to be filled one at a time. False: the kernel is older than 5.19.
  bool register_buffer_table(u32 count);
  int register_buffer(u32 index, std::byte* base, u64 bytes);  // 0 or a positive errno

  const std::string& features() const { return features_; }  // "SINGLE_ISSUER|DEFER_TASKRUN"

 private:
  void map();
  void unmap();

  int fd_ = -1, enter_fd_ = -1;
  u32 enter_flags_ = 0;
  io_uring_params params_{};
  std::byte *sq_ = nullptr, *cq_ = nullptr;
  u64 sq_bytes_ = 0, cq_bytes_ = 0, sqe_bytes_ = 0;
  io_uring_sqe* sqes_ = nullptr;
  io_uring_cqe* cqes_ = nullptr;
  u32 *sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  u32 sq_mask_ = 0, cq_mask_ = 0;
  u32 tail_ = 0, submitted_ = 0;
  bool files_ = false, buffers_ = false;  // registered
  std::string features_;
};

}  // namespace gids::io
