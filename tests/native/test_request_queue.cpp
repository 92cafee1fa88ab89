// sources: io/*.cpp store/crc32c.cpp store/mapped_file.cpp
// 100,000 requests in rounds of up to 4096, posted by 1 to 64 threads that play the blocks, answered by a controller
// that fails, reorders and stalls: each is answered once, with its own error and page.
// Argument: a directory to work in.
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

// Requests in rounds of one table each, what came of them, and what should have. Some rounds are empty, some full, and
// some name a table that is not there.
struct Job {
  struct Round {
    u64 first, size;
    u32 table;
  };
  Job(u64 count, u64 round_max, u64 seed) : requests(count), to(count * kPageBytes, kUntouched), errors(count, -1) {
    std::mt19937_64 random(seed);
    for (u64 first = 0; first < count; first += plan.back().size) {
      const u64 room = random() % 4 ? round_max : random() % (round_max + 1);
      plan.push_back({first, std::min(room, count - first), static_cast<u32>(random() % 16 ? random() % 4 == 0 : 2)});
      const u64 pages = kPages[plan.back().table % 2];
      for (u64 i = first; i < first + plan.back().size; ++i)
        requests[i] = random() % 64 ? random() % pages : pages;  // or no such page
    }
    g_total += count;
  }
  u8* place(u64 i) { return &to[i * kPageBytes]; }

  void check(const io::QueueStats& stats, const Mischief& mischief) {
    u64 failed = 0;
    for (const Round& round : plan)
      for (u64 i = round.first; i < round.first + round.size; ++i) {
        int error = queue::invalid;
        u64 word = kUntouched * 0x0101010101010101u;
        if (round.table < 2 && requests[i] < kPages[round.table]) {
          const io::QueueTable& t = tables()[round.table];
          const u64 row = requests[i] / t.file_count;
          error = mischief.error(row);
          if (!error)
            word = pattern(t.first_file + static_cast<u32>(requests[i] % t.file_count), row * kPageBytes);
        }
        failed += error != 0;
        CHECK_EQUAL(errors[i], error);
        for (u32 at = 0; at < kPageBytes; at += sizeof word) CHECK(std::memcmp(place(i) + at, &word, sizeof word) == 0);
      }
    CHECK_EQUAL(stats.taken, requests.size());
    CHECK_EQUAL(stats.failed, failed);
    CHECK_EQUAL(stats.late, 0u);
    CHECK_EQUAL(stats.timed_out, 0u);
    CHECK_EQUAL(stats.rounds, plan.size());
  }

  std::vector<Round> plan;
  std::vector<queue::Request> requests;
  std::vector<u8> to;
  std::vector<int> errors;
};

// `threads` blocks post, and copy in place of a copy engine; barriers stand for the ends of kernels.
void rounds(u64 round_max, u32 threads, u32 rounds_max, u64 count, const Mischief& mischief) {
  const io::QueueMemory memory({.staging_bytes = round_max * rounds_max * kPageBytes,
                                .slot_bytes = kPageBytes,
                                .rounds_max = rounds_max});
  std::vector<std::byte> local(memory.local_bytes());
  const queue::Pair q = memory.pair(local.data());
  CHECK_EQUAL(q.round_max, round_max);
  Job job(count, round_max, round_max * 100 + threads);
  io::QueueService service(Controller::open(g_paths, mischief), tables(), q, memory.shared());

  const std::vector<Job::Round>& plan = job.plan;
  std::barrier kernel_ends(threads);
  std::vector<std::thread> blocks;
  for (u32 k = 0; k < threads; ++k)
    blocks.emplace_back([&, k] {
      for (u64 r = 0; r < plan.size() + rounds_max - 1; ++r) {
        if (r < plan.size()) {
          if (k == 0) CHECK_EQUAL(service.arm(), r);
          kernel_ends.arrive_and_wait();
          queue::post_round(q, r, &job.requests[plan[r].first], plan[r].size, k, threads);
          queue::end_round(q, r, plan[r].table, plan[r].size, threads);
        }
        if (r + 1 < rounds_max) continue;
        const u64 c = r + 1 - rounds_max;  // the round to copy
        if (k == 0) CHECK(queue::await_round(q, c));
        kernel_ends.arrive_and_wait();
        for (u64 i = k; i < plan[c].size; i += threads) {
          const u64 at = plan[c].first + i;
          job.errors[at] = queue::outcome(q.answer(c), c, i);
          // Its length comes from memory: the thread sanitizer does not see copies of a constant length.
          if (!job.errors[at]) std::memcpy(job.place(at), q.pages(c) + i * kPageBytes, memory.slot_bytes());
        }
        kernel_ends.arrive_and_wait();
      }
    });
  for (std::thread& t : blocks) t.join();
  job.check(service.stats(), mischief);
}

// The words around the laps at which their tags wrap: a reader takes a word of its own lap, and not that of
// the lap before.
void a_word_is_told_from_that_of_the_lap_before_it_across_the_wrap_of_its_tag() {
  for (const u32 rounds_max : {1u, 3u, 64u}) {
    const io::QueueMemory memory({.staging_bytes = u64{rounds_max} * 32, .slot_bytes = 16, .rounds_max = rounds_max});
    std::vector<std::byte> local(memory.local_bytes());
    const queue::Pair q = memory.pair(local.data());
    for (const u64 lap : {u64{0}, u64{1}, (u64{1} << 24) - 3, (u64{1} << 30)}) {
      for (u64 l = lap; l < lap + 5; ++l) {
        const u64 round = l * rounds_max + rounds_max / 2;
        queue::Request r;
        u32 table, count;
        const queue::Request wanted = (u64{1} << queue::lap_shift) - 1 - l % 2;
        queue::write_entry(q, round, 1, wanted);
        CHECK(queue::read_entry(q, round, 1, r) && r == wanted);
        CHECK(!queue::read_entry(q, round + rounds_max, 1, r));
        CHECK(!queue::read_entry(q, round + 2 * rounds_max, 1, r));  // the lap between did not write it
        queue::write_doorbell(q, round, queue::tables_max - 1, queue::round_limit);
        CHECK(queue::read_doorbell(q, round, table, count));
        CHECK(table == queue::tables_max - 1 && count == queue::round_limit);
        CHECK(!queue::read_doorbell(q, round + rounds_max, table, count));
        queue::errors_of(q.answer(round))[1] = 4095;
        queue::write_answer(q, round, queue::answer(round, queue::round_limit));
        CHECK(queue::is_answered(q, round) && !queue::is_answered(q, round + rounds_max));
        CHECK_EQUAL(queue::outcome(q.answer(round), round, 1), 4095);
        CHECK_EQUAL(queue::outcome(q.answer(round), round + rounds_max, 1), queue::timed_out);
        queue::write_answer(q, round, queue::answer(round, 0));
        CHECK_EQUAL(queue::outcome(q.answer(round), round, 1), 0);
      }
    }
    queue::write_answer(q, 0, queue::closed);
    CHECK(queue::is_answered(q, 0) && queue::is_answered(q, (u64{1} << 30) * rounds_max));
    CHECK_EQUAL(queue::outcome(q.answer(0), 0, 0), queue::canceled);
  }
}

void zeroed_memory_holds_nothing() {
  const io::QueueMemory memory({.staging_bytes = 64, .slot_bytes = 16, .rounds_max = 2});
  std::vector<std::byte> local(memory.local_bytes());
  const queue::Pair q = memory.pair(local.data());
  for (u64 round = 0; round < 2; ++round) {
    queue::Request r;
    u32 table, count;
    CHECK(!queue::read_entry(q, round, 0, r) && !queue::read_entry(q, round, 1, r));
    CHECK(!queue::read_doorbell(q, round, table, count) && !queue::is_answered(q, round));
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
  rounds(4, 1, 1, 800, bad);
  rounds(1, 3, 4, 800, bad);
  rounds(5, 4, 3, 4'000, bad);
  rounds(32, 8, 2, 6'000, bad);
  rounds(512, 64, 2, 10'000, bad);
  rounds(512, 1, 8, 30'000, good);
  rounds(2048, 16, 2, 30'000, bad);
  rounds(4096, 32, 4, 20'000, bad);
  std::printf("%llu requests\n", g_total);
  CHECK(g_total >= 100'000);
}
