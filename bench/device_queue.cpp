// Host threads in the place of a GPU's blocks: they post rounds of requests and copy their pages, as fast as the queue
// service answers. Compiled and called by device_queue.py.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#include "io/clock.h"
#include "io/queue_memory.h"
#include "io/queue_service.h"

using namespace gids;

namespace {

// A stream that waits costs no processor: neither does this.
void wait_as_a_stream(const queue::Pair& q, u64 round) {
  while (!queue::is_answered(q, round)) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

double seconds_of(io::QueueService& service, const queue::Pair& q, u32 posters, const std::vector<u64>& requests,
                  u8* to, u64 bytes, int* errors, u64 page_bytes) {
  const u64 count = requests.size(), rounds = div_ceil(count, q.round_max);
  std::barrier kernel_ends(posters);
  u64 begun = 0, ended = 0;
  std::vector<std::thread> threads;
  for (u64 k = 0; k < posters; ++k)
    threads.emplace_back([&, k] {
      kernel_ends.arrive_and_wait();
      if (k == 0) begun = io::now_ns();
      for (u64 r = 0; r < rounds + q.rounds_max - 1; ++r) {
        if (r < rounds) {
          if (k == 0) service.arm();
          kernel_ends.arrive_and_wait();
          const u64 first = r * q.round_max, size = queue::round_size(q, count, first);
          queue::post_round(q, r, &requests[first], size, k, posters);
          queue::end_round(q, r, 0, size, posters);
        }
        if (r + 1 < q.rounds_max) continue;
        const u64 c = r + 1 - q.rounds_max, first = c * q.round_max, size = queue::round_size(q, count, first);
        wait_as_a_stream(q, c);
        kernel_ends.arrive_and_wait();
        for (u64 i = k; i < size; i += posters) {
          errors[first + i] = queue::outcome(q.answer(c), c, i);
          std::memcpy(to + (first + i) * bytes, q.pages(c) + i * page_bytes, bytes);
        }
        kernel_ends.arrive_and_wait();
      }
      if (k == 0) ended = io::now_ns();
    });
  for (std::thread& t : threads) t.join();
  return static_cast<double>(ended - begun) * 1e-9;
}

}  // namespace

// Reads pages of a file through the queue. The first `bytes` bytes of each go to `to`: a GPU would pull the rest
// without the help of these cores. Returns the seconds, or -1 with an error.
extern "C" double read_through_queue(const char* path, const char* kind, u32 depth, u32 page_bytes, u64 page_count,
                                     const u64* pages, u64 count, u64 staging_bytes, u32 rounds_max, u32 posters,
                                     int direct, u8* to, u64 bytes, int* errors, char* error, u64 error_bytes) {
  try {
    const auto engine = io::open_engine(kind, {path}, {.depth = depth, .max_read_bytes = page_bytes,
                                                       .max_merge_bytes = 0, .direct = direct != 0});
    const io::QueueMemory memory(
        {.staging_bytes = staging_bytes, .slot_bytes = page_bytes, .rounds_max = rounds_max});
    std::vector<std::byte> local(memory.local_bytes());
    const queue::Pair q = memory.pair(local.data());
    std::memset(q.staging, 1, q.rounds_max * q.round_bytes);  // committed, as registered with CUDA
    engine->register_memory(memory.shared().get(), memory.shared_bytes(), memory.shared());
    io::QueueService service(engine, {{page_count, 0, 1, page_bytes}}, q, memory.shared());
    return seconds_of(service, q, posters, {pages, pages + count}, to, bytes, errors, page_bytes);
  } catch (const std::exception& e) {
    std::snprintf(error, error_bytes, "%s", e.what());
    return -1;
  }
}
