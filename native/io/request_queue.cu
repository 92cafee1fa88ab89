// The kernels of the request queue: what gids/request_queue.h describes, spread over blocks and warps. Compiled
// at run time; launched by gids/io/device/device_queue.py. Every launch that ends a round was armed with the service
// first. Grids may have any size; blocks are multiples of 32 threads.
#include "gids/request_queue.h"

namespace queue = gids::queue;

namespace {

__device__ gids::u64 thread_index() { return gids::u64{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ gids::u64 thread_count() { return gids::u64{gridDim.x} * blockDim.x; }
__device__ queue::Warp this_warp() { return {threadIdx.x % 32, 32}; }
__device__ gids::u64 smaller(gids::u64 a, gids::u64 b) { return a < b ? a : b; }

}  // namespace

// Wait `stream`: posts requests[first, min(*count, first + limit)) as one round; limit <= round_max.
extern "C" __global__ void gids_post_round(const queue::Pair* pair, gids::u64 round, const queue::Request* requests,
                                           const gids::u64* count, gids::u64 first, gids::u64 limit) {
  const queue::Pair q = *pair;
  const gids::u64 size = smaller(queue::round_size(q, *count, first), limit);
  queue::post_round(q, requests + first, size, thread_index(), thread_count());
  __syncthreads();
  if (threadIdx.x == 0) queue::end_round(q, round, size, gridDim.x);
}

// Wait `stream` without cuStreamWaitValue64: one thread waits instead of the stream.
extern "C" __global__ void gids_await_round(const queue::Pair* pair, gids::u64 round) {
  if (thread_index() == 0) queue::await_round(*pair, round);
}

// Wait `stream`: after the stream has waited for completed >= round + 1, copies the first `limit` of the round's
// pages: that of requests[first + i] to to + i * bytes and its error to errors[i].
extern "C" __global__ void gids_collect_round(const queue::Pair* pair, gids::u64 round, const gids::u64* count,
                                              gids::u64 first, gids::u64 limit, gids::u8* to, gids::u64 bytes,
                                              int* errors) {
  const queue::Pair q = *pair;
  const gids::u64 size = smaller(queue::round_size(q, *count, first), limit);
  const queue::Warp warp = this_warp();
  for (gids::u64 i = thread_index() / 32; i < size; i += thread_count() / 32) {
    const int error = queue::collect_page(q, round, i, warp, to + i * bytes, static_cast<gids::u32>(bytes));
    if (warp.lane == 0) errors[i] = error;
  }
}

// Wait `warp`: the warps themselves read the pages of requests[first, min(*count, first + limit)) over all pairs,
// for each of which `round` was armed. The page of requests[first + i] goes to to + i * bytes, its error to errors[i].
// In blocks of 1024: the bound keeps a thread to 64 registers.
extern "C" __global__ __launch_bounds__(1024, 1) void gids_read_pages(const queue::Pair* pairs, gids::u64 pair_count,
                                                                      gids::u64 round, const queue::Request* requests,
                                                                      const gids::u64* count, gids::u64 first,
                                                                      gids::u64 limit, gids::u8* to, gids::u64 bytes,
                                                                      int* errors) {
  const gids::u64 warp_index = thread_index() / 32;
  const queue::Pair& q = pairs[warp_index % pair_count];  // a copy would take registers
  const gids::u64 size = smaller(*count > first ? *count - first : 0, limit);
  const queue::Warp warp = this_warp();
  for (gids::u64 i = warp_index; i < size; i += thread_count() / 32) {
    const int error = queue::read_page(q, requests[first + i], warp, to + i * bytes, static_cast<gids::u32>(bytes));
    if (warp.lane == 0) errors[i] = error;
  }
  __syncthreads();
  if (threadIdx.x == 0)
    for (gids::u64 p = 0; p < pair_count; ++p) queue::end_round(pairs[p], round, 0, gridDim.x);
}
