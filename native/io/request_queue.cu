// The kernels of the request queue: what gids/request_queue.h describes, spread over blocks. Compiled at run time;
// launched by gids/io/device/device_queue.py. Every round was armed with the service first. Grids may have any size.
#include "gids/request_queue.h"

namespace queue = gids::queue;

// Posts requests[first, *count), at most round_max of them, as one round: pages of a table.
extern "C" __global__ void gids_post_round(const queue::Pair* pair, gids::u64 round, gids::u64 table,
                                           const queue::Request* requests, const gids::u64* count, gids::u64 first) {
  const queue::Pair q = *pair;
  const gids::u64 size = queue::round_size(q, *count, first), threads = gids::u64{gridDim.x} * blockDim.x;
  queue::post_round(q, round, requests + first, size, gids::u64{blockIdx.x} * blockDim.x + threadIdx.x, threads);
  __syncthreads();
  if (threadIdx.x == 0) queue::end_round(q, round, static_cast<gids::u32>(table), size, gridDim.x);
}

// Without cuStreamWaitValue64: one thread waits for the round instead of the stream.
extern "C" __global__ void gids_await_round(const queue::Pair* pair, gids::u64 round) {
  if (blockIdx.x == 0 && threadIdx.x == 0) queue::await_round(*pair, round);
}
