// Kernels that try what the device layer promises; test_device.py launches them on each device.
#include "gids/target.h"

using gids::u32;
using gids::u64;

namespace {

__device__ u64 thread_index() { return u64{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ u64 thread_count() { return u64{gridDim.x} * blockDim.x; }

}  // namespace

extern "C" __global__ void add_arguments(u64* to, const u64* from, u64 a, u32 b, int c, float d) {
  for (u64 i = thread_index(); i < 4; i += thread_count())
    to[i] = from[i] + a + b + static_cast<u64>(static_cast<gids::i64>(c)) + static_cast<u64>(d);
}

// to[0..6] of each thread: what each intrinsic of the warp says.
extern "C" __global__ void ask_warp(u64* to, const u32* values, u32 count) {
  constexpr u64 high = u64{1} << 40;
  for (u64 i = thread_index(); i < count; i += thread_count()) {
    const u32 lane = threadIdx.x % 32, value = values[i];
    const u64 wide = value + high;
    u64* mine = to + 7 * i;
    mine[0] = __shfl_sync(~0u, wide, static_cast<int>(lane * 7 % 32));
    mine[1] = __shfl_down_sync(~0u, wide, 3);
    mine[2] = __shfl_up_sync(~0u, value, 2, 8);
    mine[3] = __shfl_xor_sync(~0u, value, 5);
    mine[4] = __ballot_sync(~0u, value % 3 == 0);
    mine[5] = (__any_sync(~0u, value == 7) ? 1 : 0) | (__all_sync(~0u, value < 90) ? 2 : 0);
    mine[6] = __match_any_sync(~0u, value % 4);
    __syncwarp();
  }
}

extern "C" __global__ void try_atomics(u32* words, u64* wide, int* narrow) {
  const u64 i = thread_index();
  atomicMin(&words[0], static_cast<u32>(i));
  atomicMax(&words[1], static_cast<u32>(i));
  atomicMax(&wide[0], i << 33);
  atomicMin(&narrow[0], -static_cast<int>(i));
  u32 now = atomicAdd(&words[2], 0);
  for (u32 before = ~now; before != now;) before = now, now = atomicCAS(&words[2], before, before + 2);
  if (atomicExch(&words[3], 1) == 0) words[4] = static_cast<u32>(i) + 1;  // one thread is first
}

// Waits for a word that the host writes.
extern "C" __global__ void await_word(const u64* word, u64 value, u64* seen) {
  u64 now = 0;
  while ((now = gids::system_ref<u64>(*const_cast<u64*>(word)).load(gids::memory_order_acquire)) < value)
    __nanosleep(200);
  *seen = now;
}

extern "C" __global__ void write_word(u64* word, u64 value) {
  if (thread_index() == 0) gids::system_ref<u64>(*word).store(value, gids::memory_order_release);
}
