// The kernels of the request queue: what gids/request_queue.h describes, spread over blocks and warps. Compiled
// at run time. All are launched on the stream that owns the pair; every launch that ends a round was armed
// with the service first. Grids may have any size; blocks are multiples of 32 threads.
#include "gids/request_queue.h"

namespace queue = gids::queue;

namespace {

__device__ gids::u64 thread_index() { return gids::u64{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ gids::u64 thread_count() { return gids::u64{gridDim.x} * blockDim.x; }
__device__ queue::Warp this_warp() { return {threadIdx.x % 32, 32}; }

}  // namespace

// Wait `stream`: posts requests[first, min(*count, first + round_max)) as one round.
extern "C" __global__ void gids_post_round(queue::Pair q, gids::u64 round, const queue::Request* requests,
                                           const gids::u64* count, gids::u64 first) {
  const gids::u64 size = queue::round_size(q, *count, first);
  queue::post_round(q, requests + first, size, thread_index(), thread_count());
  __syncthreads();
  if (threadIdx.x == 0) queue::end_round(q, round, size, gridDim.x);
}

// Wait `stream`, where cuStreamWaitValue64 is not to be had: one thread waits in the stream's place.
extern "C" __global__ void gids_await_round(queue::Pair q, gids::u64 round) { queue::await_round(q, round); }

// Wait `stream`: after the stream has waited for completed >= round + 1, copies the round's pages to
// to + i * bytes and writes errors[i], for i in [first, min(*count, first + round_max)).
extern "C" __global__ void gids_collect_round(queue::Pair q, gids::u64 round, const gids::u64* count,
                                              gids::u64 first, gids::u8* to, gids::u32 bytes, int* errors) {
  const gids::u64 size = queue::round_size(q, *count, first);
  for (gids::u64 i = thread_index() / 32; i < size; i += thread_count() / 32) {
    const queue::Warp warp = this_warp();
    const int error = queue::collect_page(q, round, i, warp, to + (first + i) * bytes, bytes);
    if (warp.lane == 0) errors[first + i] = error;
  }
}

// Wait `warp`: reads all pages by the warps themselves, over several queue pairs; rounds[p] was armed for
// pairs[p].
extern "C" __global__ void gids_read_pages(const queue::Pair* pairs, const gids::u64* rounds, gids::u32 pair_count,
                                           const queue::Request* requests, const gids::u64* count, gids::u8* to,
                                           gids::u32 bytes, int* errors) {
  const gids::u64 warp_index = thread_index() / 32;
  const queue::Pair q = pairs[warp_index % pair_count];
  for (gids::u64 i = warp_index; i < *count; i += thread_count() / 32) {
    const queue::Warp warp = this_warp();
    const int error = queue::read_page(q, requests[i], warp, to + i * bytes, bytes);
    if (warp.lane == 0) errors[i] = error;
  }
  __syncthreads();
  if (threadIdx.x == 0)
    for (gids::u32 p = 0; p < pair_count; ++p) queue::end_round(pairs[p], rounds[p], 0, gridDim.x);
}
