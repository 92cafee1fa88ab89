// Loads by multiprocessors from memory that they see, for bench/gpu_bus.py: how fast, with how many blocks?
#include "gids/target.h"

using gids::u64;

struct alignas(16) Pair {
  u64 a, b;
};

// *sum += all words. Each thread has four loads of 16 bytes in flight.
extern "C" __global__ void gids_bench_load(const Pair* from, u64 count, u64* sum) {
  const u64 threads = u64{gridDim.x} * blockDim.x;
  u64 found = 0, i = u64{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + 3 * threads < count; i += 4 * threads) {
    Pair loaded[4];
    for (int k = 0; k < 4; ++k) loaded[k] = from[i + k * threads];
    for (int k = 0; k < 4; ++k) found += loaded[k].a + loaded[k].b;
  }
  for (; i < count; i += threads) found += from[i].a + from[i].b;
  gids::local_ref<u64>(*sum).fetch_add(found, gids::memory_order_relaxed);
}
