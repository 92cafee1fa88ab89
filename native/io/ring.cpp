#include "io/ring.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <new>
#include <system_error>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

namespace gids::io {
namespace {

// Newer than the oldest headers that this is built with.
constexpr u32 coop_taskrun = 1u << 8;    // 5.19
constexpr u32 single_issuer = 1u << 12;  // 6.0
constexpr u32 defer_taskrun = 1u << 13;  // 6.1
constexpr u32 no_sq_array = 1u << 16;    // 6.6
constexpr u32 enter_registered_ring = 1u << 4;
constexpr u32 register_buffers2 = 15, register_buffers_update = 16, register_ring_fds = 20, unregister_ring_fds = 21;
constexpr u32 register_sparse = 1u;

struct RegisterTable {  // io_uring_rsrc_register
  u32 count, flags;
  u64 reserved, data, tags;
};
struct RegisterUpdate {  // io_uring_rsrc_update2
  u32 offset, reserved;
  u64 data, tags;
  u32 count, reserved2;
};
struct RegisterRingFd {  // io_uring_rsrc_update
  u32 offset, reserved;
  u64 data;
};
static_assert(sizeof(RegisterTable) == 32 && sizeof(RegisterUpdate) == 32 && sizeof(RegisterRingFd) == 16);

struct Features {
  u32 flags;
  const char* names;
};
constexpr Features optional_features[] = {
    {single_issuer | defer_taskrun | no_sq_array, "SINGLE_ISSUER|DEFER_TASKRUN|NO_SQARRAY"},
    {single_issuer | defer_taskrun, "SINGLE_ISSUER|DEFER_TASKRUN"},
    {coop_taskrun, "COOP_TASKRUN"},
    {0, "no optional features"},
};

std::string reason(int error) {
  if (error == ENOSYS) return "the kernel has no io_uring";
  if (error == EPERM) {
    int disabled = 0;
    std::ifstream("/proc/sys/kernel/io_uring_disabled") >> disabled;
    if (disabled) return "the setting kernel.io_uring_disabled=" + std::to_string(disabled) + " forbids io_uring";
    return "a seccomp profile or security module forbids io_uring (Docker's default profile does)";
  }
  if (error == ENOMEM) return "no memory for an io_uring (RLIMIT_MEMLOCK may bound it: raise `ulimit -l`)";
  return "io_uring_setup failed";
}

}  // namespace

Ring::Ring(u32 entries) {
  for (const Features& f : optional_features) {
    params_ = {};
    params_.flags = f.flags | IORING_SETUP_CLAMP;
    features_ = f.names;
    fd_ = static_cast<int>(syscall(__NR_io_uring_setup, entries, &params_));  // close-on-exec by itself
    if (fd_ >= 0 || errno != EINVAL) break;
  }
  if (fd_ < 0) {
    const int error = errno;
    throw std::system_error(error, std::generic_category(), reason(error));
  }
  if (!(params_.features & IORING_FEAT_RW_CUR_POS)) {  // came with IORING_OP_READ
    ::close(fd_);
    throw std::system_error(ENOSYS, std::generic_category(), "the kernel's io_uring is older than Linux 5.6");
  }
  try {
    map();
  } catch (...) {
    unmap();
    throw;
  }
  enter_fd_ = fd_;
  RegisterRingFd u{~0u, 0, static_cast<u64>(fd_)};  // saves a look-up of the descriptor in every enter()
  if (syscall(__NR_io_uring_register, fd_, register_ring_fds, &u, 1) == 1) {
    enter_fd_ = static_cast<int>(u.offset);
    enter_flags_ = enter_registered_ring;
  }
}

Ring::~Ring() {
  if (enter_flags_ & enter_registered_ring) {  // a thread has 16 places for rings, which a closed one would keep
    RegisterRingFd u{static_cast<u32>(enter_fd_), 0, 0};
    syscall(__NR_io_uring_register, fd_, unregister_ring_fds, &u, 1);
  }
  // The kernel tears a closed ring down later: until then it would hold the files and pin the memory.
  if (files_) syscall(__NR_io_uring_register, fd_, IORING_UNREGISTER_FILES, nullptr, 0);
  if (buffers_) syscall(__NR_io_uring_register, fd_, IORING_UNREGISTER_BUFFERS, nullptr, 0);
  unmap();
}

void Ring::map() {
  auto map_at = [this](u64 bytes, u64 offset) {
    void* m = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, static_cast<off_t>(offset));
    if (m == MAP_FAILED) throw std::bad_alloc();
    madvise(m, bytes, MADV_DONTFORK);
    return static_cast<std::byte*>(m);
  };
  sq_bytes_ = params_.sq_off.array + params_.sq_entries * sizeof(u32);
  cq_bytes_ = params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe);
  const bool shared = params_.features & IORING_FEAT_SINGLE_MMAP;
  if (shared) sq_bytes_ = cq_bytes_ = std::max(sq_bytes_, cq_bytes_);
  sq_ = map_at(sq_bytes_, IORING_OFF_SQ_RING);
  cq_ = shared ? sq_ : map_at(cq_bytes_, IORING_OFF_CQ_RING);
  sqe_bytes_ = params_.sq_entries * sizeof(io_uring_sqe);
  sqes_ = reinterpret_cast<io_uring_sqe*>(map_at(sqe_bytes_, IORING_OFF_SQES));

  auto word = [](std::byte* base, u32 offset) { return reinterpret_cast<u32*>(base + offset); };
  sq_tail_ = word(sq_, params_.sq_off.tail);
  cq_head_ = word(cq_, params_.cq_off.head);
  cq_tail_ = word(cq_, params_.cq_off.tail);
  cqes_ = reinterpret_cast<io_uring_cqe*>(cq_ + params_.cq_off.cqes);
  sq_mask_ = params_.sq_entries - 1;
  cq_mask_ = params_.cq_entries - 1;
  if (!(params_.flags & no_sq_array)) {
    u32* array = word(sq_, params_.sq_off.array);
    for (u32 i = 0; i < params_.sq_entries; ++i) array[i] = i;
  }
}

void Ring::unmap() {
  if (sqes_) munmap(sqes_, sqe_bytes_);
  if (cq_ && cq_ != sq_) munmap(cq_, cq_bytes_);
  if (sq_) munmap(sq_, sq_bytes_);
  ::close(fd_);
}

io_uring_sqe* Ring::push() {
  io_uring_sqe* e = &sqes_[tail_++ & sq_mask_];
  std::memset(e, 0, sizeof *e);
  return e;
}

int Ring::enter(u32 wait) {
  std::atomic_ref(*sq_tail_).store(tail_, std::memory_order_release);
  // GETEVENTS also without waiting: under DEFER_TASKRUN completions appear only then.
  const auto n =
      syscall(__NR_io_uring_enter, enter_fd_, queued(), wait, enter_flags_ | IORING_ENTER_GETEVENTS, nullptr, 0);
  if (n < 0) return -errno;
  submitted_ += static_cast<u32>(n);
  return 0;
}

bool Ring::register_files(const int* fds, u32 count) {
  files_ = count && syscall(__NR_io_uring_register, fd_, IORING_REGISTER_FILES, fds, count) == 0;
  return files_;
}

bool Ring::register_buffer_table(u32 count) {
  RegisterTable table{count, register_sparse, 0, 0, 0};
  buffers_ = syscall(__NR_io_uring_register, fd_, register_buffers2, &table, sizeof table) == 0;
  return buffers_;
}

int Ring::register_buffer(u32 index, std::byte* base, u64 bytes) {
  iovec buffer{base, bytes};
  RegisterUpdate update{index, 0, reinterpret_cast<u64>(&buffer), 0, 1, 0};
  return syscall(__NR_io_uring_register, fd_, register_buffers_update, &update, sizeof update) == 1 ? 0 : errno;
}

}  // namespace gids::io
