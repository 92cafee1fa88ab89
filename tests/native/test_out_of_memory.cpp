// sources: packs/*.cpp io/*.cpp cache/workers.cpp cache/convert_rows.cpp cache/copy.cpp store/crc32c.cpp store/mapped_file.cpp
// Sweeps and reads of packs of which one allocation fails, each in turn: they end, and say so, or all rows are right.
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
  if (std::strcmp(name, "gids-sweep") && std::strcmp(name, "gids-copy") && std::strcmp(name, "gids-write"))
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

struct Case {
  bool to_file, unreadable;
};

// Whether an allocation failed: it was the first after `left` others.
bool run(const std::string& shard, const std::string& rows, const Case& c, i64 left) {
  io::Options options;
  options.depth = 8;
  options.max_read_bytes = 16 << 10;
  options.direct = false;
  const std::shared_ptr<io::Engine> engine = io::open_engine("threads", {shard}, options);
  if (c.unreadable) engine->inject_faults({{0, 100 * row_bytes, EIO, 1u << 30}});
  packs::RowSet set(row_count);
  for (u32 row = 0; row < row_count; row += 2) set.insert(row);
  set.seal();
  const auto list = std::make_shared<packs::RowList>(set);
  const int fd = open((g_dir + "/scratch").c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  CHECK(fd >= 0);
  const u64 bytes = row_count / 2 * row_bytes;
  std::vector<std::byte> memory(2 * bytes);
  std::shared_ptr<packs::Writer> writer;
  if (c.to_file) writer = std::make_shared<packs::Writer>(std::vector{fd}, 2, 8, 8192);
  packs::TableSweep table;
  table.geometry = {row_count, row_bytes, 4096, 8, 1, 0};
  table.targets = {{list, c.to_file ? nullptr : memory.data(), 0},
                   {list, c.to_file ? nullptr : memory.data() + bytes, bytes}};
  int error;
  u64 lost;
  {
    packs::Sweep sweep(engine, writer, std::make_shared<packs::Priority>(), {table}, {16 << 10, 4, 0, 3});
    g_left = left;
    for (int i = 0; !sweep.wait_for(100); ++i) CHECK(i < 600);
    error = sweep.error();
    lost = sweep.bad_pages().size();
  }
  const bool failed = g_left.exchange(-1) < 0;
  CHECK(error == 0 || (failed && error == ENOMEM));
  if (!error) {
    CHECK_EQUAL(lost, c.unreadable ? 1u : 0u);
    if (c.to_file) CHECK_EQUAL(pread(fd, memory.data(), memory.size(), 0), static_cast<ssize_t>(memory.size()));
    for (u64 pack = 0; pack < 2; ++pack)
      for (u64 i = 0; i < row_count / 2; ++i) {
        if (c.unreadable && 2 * i / 8 == 100 / 8) continue;
        CHECK(!std::memcmp(memory.data() + pack * bytes + i * row_bytes, rows.data() + 2 * i * row_bytes, row_bytes));
      }
  }
  close(fd);
  return failed;
}

}  // namespace

int main(int, char** argv) {
  g_dir = argv[1];
  std::string rows(row_count * row_bytes, '\0');
  for (u64 i = 0; i < rows.size(); ++i) rows[i] = static_cast<char>(i * 2654435761u >> 13);
  const std::string shard = g_dir + "/shard";
  std::ofstream(shard, std::ios::binary) << rows;
  for (const Case& c : {Case{false, false}, Case{true, true}}) {
    // The sweep may be ahead of the count, so that one run meets no failure although the next one does.
    int failures = 0, without = 0;
    for (i64 left = 0; without < 5; ++left) {
      if (run(shard, rows, c, left)) ++failures, without = 0;
      else ++without;
    }
    CHECK(failures > 10);  // there were allocations
  }
}
