// sources: io/*.cpp store/crc32c.cpp store/mapped_file.cpp
// A million requests through rings of 4 to 4096 slots, posted by 1 to 64 threads that play the warps, answered
// by a controller that fails, reorders and stalls: each is answered once, with its own status and page.
// Argument: a directory to work in.
#include <atomic>
#include <barrier>
#include <cstring>
#include <fstream>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "controller.h"
#include "io/queue_memory.h"
#include "io/queue_service.h"

using namespace gids;

namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr u64 kScale = 5;  // the sanitizers are that much slower
#else
constexpr u64 kScale = 1;
#endif

constexpr u32 kPageBytes = 64;
constexpr u32 kFailEvery = 5;
constexpr u64 kPages[] = {1000, 37};  // of the two tables
constexpr u8 kUntouched = 0xee;
std::vector<std::string> g_paths;
u64 g_total = 0;

const std::vector<io::QueueTable>& tables() {  // table 0 over files 0 and 1, table 1 in file 2
  static const std::vector<io::QueueTable> t = {{kPages[0], 0, 2, kPageBytes}, {kPages[1], 2, 1, kPageBytes}};
  return t;
}

// Requests, what came of them, and what should have.
struct Job {
  Job(u64 count, u64 seed) : requests(count), to(count * kPageBytes, kUntouched), errors(count, -1) {
    std::mt19937_64 random(seed);
    for (queue::Request& r : requests) {
      const u32 table = random() % 4 == 0;
      r = queue::request(table, random() % kPages[table]);
      if (random() % 64 == 0) r = queue::request(table + 1, kPages[table]);  // no such page, or no such table
    }
    g_total += count;
  }
  u8* place(u64 i) { return &to[i * kPageBytes]; }

  void check(const io::QueueStats& stats, const Mischief& mischief) {
    u64 failed = 0;
    for (u64 i = 0; i < requests.size(); ++i) {
      const u32 table = queue::table_of(requests[i]);
      const u64 page = queue::page_of(requests[i]);
      int error = queue::invalid;
      u64 word = kUntouched * 0x0101010101010101u;
      if (table < 2 && page < kPages[table]) {
        const io::QueueTable& t = tables()[table];
        const u64 row = page / t.file_count;
        error = mischief.error(row);
        if (!error) word = pattern(t.first_file + static_cast<u32>(page % t.file_count), row * kPageBytes);
      }
      failed += error != 0;
      CHECK_EQUAL(errors[i], error);
      for (u32 at = 0; at < kPageBytes; at += sizeof word) CHECK(std::memcmp(place(i) + at, &word, sizeof word) == 0);
    }
    CHECK_EQUAL(stats.taken, requests.size());
    CHECK_EQUAL(stats.failed, failed);
    CHECK_EQUAL(stats.late, 0u);
    CHECK_EQUAL(stats.timed_out, 0u);
  }

  std::vector<queue::Request> requests;
  std::vector<u8> to;
  std::vector<int> errors;
};

struct Rig {
  Rig(u64 depth, u32 pairs, u32 rounds_max, const Mischief& mischief)
      : memory({.staging_bytes = depth * pairs * kPageBytes,
                .slot_bytes = kPageBytes,
                .pairs = pairs,
                .rounds_max = rounds_max}),
        local(memory.local_bytes()),
        engine(Controller::open(g_paths, mischief)) {
    CHECK_EQUAL(memory.depth(), depth);
    for (u32 p = 0; p < pairs; ++p) this->pairs.push_back(memory.pair(p, local.data()));
    service = std::make_unique<io::QueueService>(engine, tables(), this->pairs, memory.shared());
  }
  io::QueueMemory memory;
  std::vector<std::byte> local;
  std::vector<queue::Pair> pairs;
  std::shared_ptr<Controller> engine;
  std::unique_ptr<io::QueueService> service;
};

// The copies take their length from the pair: the thread sanitizer does not see those of a constant length.

// Wait `stream`: `threads` blocks post and collect; barriers stand for the ends of kernels. Some rounds are
// empty, some full.
void rounds(u64 depth, u32 threads, u32 rounds_max, u64 count, const Mischief& mischief) {
  Job job(std::max<u64>(count / kScale, 50), depth * 100 + threads);
  Rig rig(depth, 1, rounds_max, mischief);
  const queue::Pair& q = rig.pairs[0];

  struct Round {
    u64 first, size;
  };
  std::vector<Round> plan;
  std::mt19937_64 random(depth + threads);
  for (u64 first = 0; first < job.requests.size(); first += plan.back().size) {
    const u64 room = random() % 4 ? q.round_max : random() % (q.round_max + 1);
    plan.push_back({first, std::min(room, queue::round_size(q, job.requests.size(), first))});
  }
  std::barrier kernel_ends(threads);
  std::vector<std::thread> blocks;
  for (u32 k = 0; k < threads; ++k)
    blocks.emplace_back([&, k] {
      for (u64 r = 0; r < plan.size() + rounds_max - 1; ++r) {
        if (r < plan.size()) {
          if (k == 0) CHECK_EQUAL(rig.service->arm(0), r);
          kernel_ends.arrive_and_wait();
          queue::post_round(q, &job.requests[plan[r].first], plan[r].size, k, threads);
          queue::end_round(q, r, plan[r].size, threads);
        }
        if (r + 1 < rounds_max) continue;
        const u64 c = r + 1 - rounds_max;  // the round to collect
        if (k == 0) CHECK(queue::await_round(q, c));
        kernel_ends.arrive_and_wait();
        for (u64 i = k; i < plan[c].size; i += threads) {
          const u64 at = plan[c].first + i;
          job.errors[at] = queue::collect_page(q, c, i, queue::Warp{}, job.place(at), q.slot_bytes);
        }
        kernel_ends.arrive_and_wait();
      }
    });
  for (std::thread& t : blocks) t.join();
  job.check(rig.service->stats(), mischief);
  CHECK_EQUAL(rig.service->stats().rounds, plan.size());
}

// Wait `warp`: each thread is a warp that reads one page after the other, over several queue pairs.
void warps(u64 depth, u32 threads, u32 pairs, u64 count, const Mischief& mischief) {
  Job job(std::max<u64>(count / kScale, 50), depth * 100 + threads + 7);
  Rig rig(depth, pairs, 1, mischief);
  constexpr u64 kKernels = 2;
  std::vector<u64> armed(pairs);
  std::atomic<u64> next{0};
  for (u64 kernel = 0; kernel < kKernels; ++kernel) {
    const u64 end = job.requests.size() * (kernel + 1) / kKernels;
    for (u32 p = 0; p < pairs; ++p) armed[p] = rig.service->arm(p);
    std::barrier start(threads);
    std::vector<std::thread> lanes;
    for (u32 k = 0; k < threads; ++k)
      lanes.emplace_back([&, k] {
        const queue::Pair& q = rig.pairs[k % pairs];
        start.arrive_and_wait();
        for (u64 i; (i = next.fetch_add(1)) < end;)
          job.errors[i] = queue::read_page(q, job.requests[i], queue::Warp{}, job.place(i), q.slot_bytes);
        for (u32 p = 0; p < pairs; ++p) queue::end_round(rig.pairs[p], armed[p], 0, threads);
      });
    for (std::thread& t : lanes) t.join();
    next = end;
    for (u32 p = 0; p < pairs; ++p) CHECK(queue::await_round(rig.pairs[p], armed[p]));
  }
  job.check(rig.service->stats(), mischief);
  CHECK_EQUAL(rig.service->stats().rounds, pairs * kKernels);
}

// The words around the laps at which their tags wrap: a reader takes a word of its own lap, and not that of
// the lap before.
void a_word_is_told_from_that_of_the_lap_before_it_across_the_wrap_of_its_tag() {
  for (const u64 depth : {2u, 64u}) {
    const io::QueueMemory memory({.staging_bytes = depth * 16, .slot_bytes = 16, .rounds_max = 1});
    std::vector<std::byte> local(memory.local_bytes());
    const queue::Pair q = memory.pair(0, local.data());
    for (const u64 lap : {u64{0}, u64{1}, (u64{1} << 48) - 3, (u64{1} << 56)}) {
      for (u64 l = lap; l < lap + 5; ++l) {
        const u64 ticket = l * depth + 1;
        queue::Request r;
        int error;
        const queue::Request wanted = queue::request(0x7fff, (u64{1} << 48) - 1 - l % 2);
        queue::write_entry(q, ticket, wanted);
        CHECK(queue::read_entry(q, ticket, r) && r == wanted);
        CHECK(!queue::read_entry(q, ticket + depth, r));
        queue::write_status(q, ticket, 4095);
        CHECK(queue::read_status(q, ticket, error) && error == 4095);
        CHECK(!queue::read_status(q, ticket + depth, error));
      }
    }
    for (const u64 lap : {u64{0}, (u64{1} << 32) - 3}) {
      for (u64 l = lap; l < lap + 5; ++l) {
        const u64 round = l * queue::doorbells + 5;
        u32 count;
        queue::write_doorbell(q, round, ~0u);
        CHECK(queue::read_doorbell(q, round, count) && count == ~0u);
        CHECK(!queue::read_doorbell(q, round + queue::doorbells, count));
      }
    }
  }
}

void zeroed_memory_holds_nothing() {
  const io::QueueMemory memory({.staging_bytes = 64, .slot_bytes = 16});
  std::vector<std::byte> local(memory.local_bytes());
  const queue::Pair q = memory.pair(0, local.data());
  for (u64 i = 0; i < q.depth(); ++i) {
    queue::Request r;
    int error;
    u32 count;
    CHECK(!queue::read_entry(q, i, r) && !queue::read_status(q, i, error) && !queue::read_doorbell(q, i, count));
  }
}

}  // namespace

int main(int, char** argv) {
  for (int i = 0; i < 3; ++i) {
    g_paths.push_back(std::string(argv[1]) + "/shard-" + std::to_string(i));
    std::ofstream(g_paths.back()) << "not read";
  }
  zeroed_memory_holds_nothing();
  a_word_is_told_from_that_of_the_lap_before_it_across_the_wrap_of_its_tag();

  const Mischief good{};
  const Mischief bad{.fail_every = kFailEvery, .stall_one_in = 50, .shuffle = true};
  rounds(4, 1, 1, 8'000, bad);
  rounds(4, 3, 4, 4'000, bad);
  rounds(64, 8, 2, 60'000, bad);
  rounds(1024, 64, 2, 100'000, bad);
  rounds(4096, 1, 8, 200'000, good);
  rounds(4096, 16, 2, 300'000, bad);
  warps(4, 1, 1, 4'000, good);
  warps(4, 64, 1, 40'000, bad);
  warps(16, 7, 3, 40'000, bad);
  warps(512, 64, 4, 100'000, bad);
  warps(4096, 32, 1, 150'000, bad);
  std::printf("%llu requests\n", g_total);
  CHECK(g_total >= 1'000'000 / kScale);
}
