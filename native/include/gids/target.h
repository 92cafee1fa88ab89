// One source, two compilers. Included by every header that the host compiler and the CUDA run-time
// compiler (NVRTC) share; it names the integer types and the atomics of each world.
//
// GIDS_SIMT is 1 where a caller is one lane of a warp and may use the warp's and the block's intrinsics: on the
// GPU, and on the host where the tests emulate one (GIDS_EMULATED; tests/emulator.h). It is 0 on the host, where
// a thread stands for a warp.
#pragma once

#if defined(__CUDA_ARCH__) || defined(GIDS_EMULATED)
#define GIDS_SIMT 1
#else
#define GIDS_SIMT 0
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#include <cuda/atomic>
#define GIDS_HD __host__ __device__ __forceinline__
#else
#include <atomic>
#define GIDS_HD inline
#endif

namespace gids {

// NVRTC spells uint64_t `unsigned long long`, g++ `unsigned long`: one name that both can overload on.
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;
static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8 && sizeof(i64) == 8);

// A word that crosses the bus is polled with poll_order; acquire_polled() follows the poll that saw the awaited value.
// On a GPU each acquiring load would empty the nearest cache. ThreadSanitizer, on the host, knows no fences.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
constexpr auto poll_order = cuda::std::memory_order_relaxed;
GIDS_HD void acquire_polled() { cuda::atomic_thread_fence(cuda::std::memory_order_acquire, cuda::thread_scope_system); }
#else
constexpr auto poll_order = std::memory_order_acquire;
GIDS_HD void acquire_polled() {}
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
using cuda::std::memory_order_acq_rel;
using cuda::std::memory_order_acquire;
using cuda::std::memory_order_relaxed;
using cuda::std::memory_order_release;
using MemoryOrder = cuda::std::memory_order;
// Words that only one device touches (a page table lives on one device).
template <class T> using local_ref = cuda::atomic_ref<T, cuda::thread_scope_device>;
// Words that cross the bus: loads and stores only, one writer each.
template <class T> using system_ref = cuda::atomic_ref<T, cuda::thread_scope_system>;
#else
using std::memory_order_acq_rel;
using std::memory_order_acquire;
using std::memory_order_relaxed;
using std::memory_order_release;
using MemoryOrder = std::memory_order;
#if defined(GIDS_EMULATED)
template <class T> using local_ref = emulated::LocalRef<T>;
template <class T> using system_ref = emulated::SystemRef<T>;
#else
template <class T> using local_ref = std::atomic_ref<T>;
template <class T> using system_ref = std::atomic_ref<T>;
#endif
static_assert(std::atomic_ref<u64>::is_always_lock_free, "a page word is changed by one instruction");
#endif

GIDS_HD constexpr u64 div_ceil(u64 a, u64 b) { return (a + b - 1) / b; }
GIDS_HD constexpr u64 align_up(u64 a, u64 b) { return div_ceil(a, b) * b; }

}  // namespace gids
