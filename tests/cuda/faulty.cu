// Kernels that do what no kernel may; test_emulator.py shows that the emulator says so.
#include "gids/target.h"

using gids::u32;
using gids::u64;

// Each thread reads its neighbor's value: without the barrier, only some neighbors have written.
extern "C" __global__ void reverse(u32* to, const u32* from, u32 with_barrier) {
  __shared__ u32 values[64];
  values[threadIdx.x] = from[threadIdx.x];
  if (with_barrier) __syncthreads();
  to[threadIdx.x] = values[63 - threadIdx.x];
}

// Lanes of a warp are not in step, even without a branch.
extern "C" __global__ void rotate(u32* values, u32 with_barrier) {
  const u32 next = values[(threadIdx.x + 1) % 32];
  if (with_barrier) __syncwarp();
  values[threadIdx.x] = next;
}

extern "C" __global__ void part_at_barriers(u32* to) {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
  to[threadIdx.x] = 1;
}

extern "C" __global__ void leave_a_lane_out(u32* to) {
  if (threadIdx.x % 32 != 3) to[threadIdx.x] = __ballot_sync(~0u, 1);
  else __syncthreads();
}

extern "C" __global__ void ask_with_a_foreign_mask(u32* to) { to[threadIdx.x] = __ballot_sync(0xffffu, 1); }

extern "C" __global__ void wait_for_ever(u32* word) {
  while (gids::local_ref<u32>(*word).load(gids::memory_order_relaxed) == 0) __nanosleep(100);
}

// Never lets another thread run: it knows nothing of atomics.
extern "C" __global__ void watch_for_ever(const volatile u32* word) {
  while (*word == 0) {}
}

extern "C" __global__ void give_up(u32*) { __trap(); }

extern "C" __global__ void touch(gids::u8* bytes, gids::i64 at, u32 write) {
  if (threadIdx.x != 7) return;
  if (write) bytes[at] = 1;
  else if (bytes[at] == 17) bytes[0] = 0;
}

extern "C" __global__ void copy_vector(uint4* to, u64 from) { *to = *reinterpret_cast<const uint4*>(from); }

extern "C" __global__ void shift(u32* to, u32 by) { *to = *to << by; }

__device__ u32 fill_the_stack(u32 depth) {
  volatile u32 room[64];
  room[depth % 64] = depth;
  return depth ? fill_the_stack(depth - 1) + room[depth % 64] : 0;
}
extern "C" __global__ void call_deeply(u32* to, u32 depth) { *to = fill_the_stack(depth); }
