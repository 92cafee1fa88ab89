// sources: packs/*.cpp io/*.cpp cache/workers.cpp cache/convert_rows.cpp cache/copy.cpp store/crc32c.cpp store/mapped_file.cpp
// Sweeps of which one allocation fails, each in turn: they end, and say so, or all copies are right.
// Argument: a directory to work in.
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include "check.h"
#include "packs/sweep.h"

using namespace gids;

namespace {

// Allocations of the threads of sweeps, copies and writes until one fails; below 0: none does.
std::atomic<i64> g_left{-1};

bool fails() {
  if (g_left.load(std::memory_order_relaxed) < 0) return false;
  char name[16] = {};
  pthread_getname_np(pthread_self(), name, sizeof name);
  if (std::strcmp(name, "gids-annex") && std::strcmp(name, "gids-copy") && std::strcmp(name, "gids-write"))
    return false;
  return g_left.fetch_sub(1) == 0;
}

}  // namespace

// Not inlined: the compiler would take std::free for the end of what it believes another function allocated.
__attribute__((noinline)) void* operator new(std::size_t bytes) {
  void* const p = fails() ? nullptr : std::malloc(bytes ? bytes : 1);
  if (!p) throw std::bad_alloc();
  return p;
}
__attribute__((noinline)) void operator delete(void* p) noexcept { std::free(p); }
__attribute__((noinline)) void operator delete(void* p, std::size_t) noexcept { std::free(p); }

namespace {

constexpr u64 row_count = 1024, row_bytes = 512;
std::string g_dir;

// Whether an allocation failed: it was the first after `left` others.
bool run(const std::string& shard, const std::string& rows, bool unreadable, i64 left) {
  io::Options options;
  options.depth = 8;
  options.max_read_bytes = 16 << 10;
  options.direct = false;
  const std::shared_ptr<io::Engine> engine = io::open_engine("threads", {shard}, options);
  if (unreadable) engine->inject_faults({{0, 100 * row_bytes, EIO, 1u << 30}});
  auto file = [](const char* name) {
    const int fd = open((g_dir + name).c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    return fd;
  };
  const int fd = file("/scratch"), spool = file("/spool");
  auto uses = std::make_shared<packs::Uses>(spool, row_count);
  std::vector<u32> even;
  for (u32 row = 0; row < row_count; row += 2) even.push_back(row);
  for (int step = 0; step < 2; ++step) uses->append(even);
  auto workers = std::make_shared<cache::Workers>(2);
  const cache::Geometry geometry{row_count, row_bytes, 4096, 8, 1, 0};
  std::shared_ptr<packs::AnnexPlan> plan = packs::plan_annex(*uses, geometry, {0, 8192, 16 << 10}, *workers, [] {});
  int error;
  {
    auto writer = std::make_shared<packs::Writer>(std::vector{fd}, 2, 8, 8192);
    packs::AnnexSweep sweep(engine, writer, workers, uses, plan, {4});
    g_left = left;
    for (int i = 0; !sweep.wait_for(100); ++i) CHECK(i < 600);
    error = sweep.result().error;
  }
  const bool failed = g_left.exchange(-1) < 0;
  CHECK(error == (unreadable ? EIO : 0) || (failed && error == ENOMEM));
  if (!error) {
    std::vector<std::byte> memory(plan->bytes());
    CHECK_EQUAL(pread(fd, memory.data(), memory.size(), 0), static_cast<ssize_t>(memory.size()));
    for (u32 step = 0; step < 2; ++step)
      for (u64 i = 0; i < even.size(); ++i)
        CHECK(!std::memcmp(memory.data() + plan->run_begin[step] + i * row_bytes, rows.data() + even[i] * row_bytes,
                           row_bytes));
  }
  close(fd);
  close(spool);
  return failed;
}

}  // namespace

int main(int, char** argv) {
  g_dir = argv[1];
  std::string rows(row_count * row_bytes, '\0');
  for (u64 i = 0; i < rows.size(); ++i) rows[i] = static_cast<char>(i * 2654435761u >> 13);
  const std::string shard = g_dir + "/shard";
  std::ofstream(shard, std::ios::binary) << rows;
  for (const bool unreadable : {false, true}) {
    // The sweep may be ahead of the count, so that one run meets no failure although the next one does.
    int failures = 0, without = 0;
    for (i64 left = 0; without < 5; ++left) {
      if (run(shard, rows, unreadable, left)) ++failures, without = 0;
      else ++without;
    }
    CHECK(failures > 10);  // there were allocations
  }
}
