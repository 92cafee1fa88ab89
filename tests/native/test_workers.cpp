// sources: cache/workers.cpp store/mapped_file.cpp
// The workers that several tables share: every piece of every job is done once, by one thread at a time.
#include <cstddef>
#include <thread>
#include <vector>

#include "cache/workers.h"
#include "check.h"

using namespace gids;

int main() {
  constexpr u32 callers = 3;
  for (const u32 threads : {1u, 4u}) {
    cache::Workers workers(threads);
    CHECK_EQUAL(workers.threads(), threads);
    std::vector<std::thread> tables;
    for (u32 t = 0; t < callers; ++t) {
      tables.emplace_back([&workers, t] {
        for (size_t round = 0; round < 300; ++round) {
          const size_t n = round % 40 * (t + 1), grain = 1 + round % 7;
          std::vector<u32> done(n);
          std::vector<size_t> by_worker(workers.threads());
          workers.parallel_for(n, grain, [&](size_t begin, size_t end, u32 worker) {
            for (size_t i = begin; i < end; ++i) ++done[i];
            by_worker[worker] += end - begin;
          });
          size_t sum = 0;
          for (const size_t count : by_worker) sum += count;
          CHECK_EQUAL(sum, n);
          for (const u32 times : done) CHECK_EQUAL(times, 1u);
        }
      });
    }
    for (std::thread& table : tables) table.join();
  }
}
