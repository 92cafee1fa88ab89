// sources: packs/*.cpp io/*.cpp cache/*.cpp store/crc32c.cpp store/mapped_file.cpp
// The annex on real files: planned by several threads, swept while the table is read at random, then read in pieces,
// with injected faults. Every row delivered equals the table's. Argument: a directory to work in.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "cache/page_cache.h"
#include "check.h"
#include "packs/annex_plan.h"
#include "packs/sweep.h"
#include "packs/run_reader.h"

using namespace gids;
using cache::Geometry;
using cache::PageCache;
using packs::AnnexPlan;
using packs::AnnexSweep;
using packs::RunMemory;
using packs::RunReader;
using packs::Uses;

namespace {

using Random = std::mt19937_64;

struct File {
  explicit File(const std::string& name) : path(name), fd(open(name.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600)) {
    CHECK(fd >= 0);
  }
  ~File() {
    close(fd);
    unlink(path.c_str());
  }
  std::string path;
  int fd;
};

struct Source {
  Geometry geometry;
  std::vector<u64> rows;
  std::vector<std::unique_ptr<File>> files;  // the shards, then the annex

  Source(const std::string& dir, u32 row_bytes, u32 page_bytes, u64 row_count, u32 shards)
      : geometry{row_count, row_bytes, page_bytes, page_bytes / row_bytes, shards, 0},
        rows(row_count * row_bytes / 8) {
    Random random(row_bytes);
    for (u64& v : rows) v = random();
    for (u32 f = 0; f <= shards; ++f) files.push_back(std::make_unique<File>(dir + "/file-" + std::to_string(f)));
    std::vector<char> page(page_bytes);
    for (u64 p = 0; p < geometry.page_count(); ++p) {
      const u64 first = p * geometry.rows_per_page, n = std::min<u64>(geometry.rows_per_page, row_count - first);
      std::memcpy(page.data(), row(first), n * row_bytes);
      const auto at = static_cast<off_t>(geometry.offset_of(p));
      CHECK(pwrite(files[geometry.file_of(p)]->fd, page.data(), page_bytes, at) == static_cast<ssize_t>(page_bytes));
    }
  }
  const std::byte* row(u64 id) const {
    return reinterpret_cast<const std::byte*>(rows.data()) + id * geometry.row_bytes;
  }
};

std::vector<std::vector<u32>> draw_steps(Random& random, u64 rows, u32 count, u64 most) {
  std::vector<std::vector<u32>> steps(count);
  for (auto& step : steps) {
    step.resize(random() % 5 ? random() % most : 0);
    for (u32& row : step) {
      const double r = static_cast<double>(random() >> 11) / 9007199254740992.0;
      row = static_cast<u32>(static_cast<double>(rows) * r * r);
    }
  }
  return steps;
}

// Rows that are wrong, of every step.
size_t play(const Source& source, RunReader& reader, const std::vector<std::vector<u32>>& steps) {
  const u64 row_bytes = source.geometry.row_bytes;
  size_t wrong = 0;
  for (const auto& step : steps) {
    std::vector<std::byte> out(step.size() * row_bytes);
    CHECK_EQUAL(reader.read(out.data(), [] {}).error, 0);
    for (size_t i = 0; i < step.size(); ++i)
      wrong += std::memcmp(&out[i * row_bytes], source.row(step[i]), row_bytes) != 0;
  }
  return wrong;
}

void every_row(const std::string& dir, const std::string& kind, u64 seed) {
  Random random(seed);
  const u32 row_bytes = seed % 2 ? 64 : 512;
  const Source source(dir, row_bytes, 512, 20'000, 1 + seed % 3);
  const auto steps = draw_steps(random, source.geometry.row_count, 12, 15'000);
  auto workers = std::make_shared<cache::Workers>(3);
  const File spool(dir + "/spool");
  auto uses = std::make_shared<Uses>(spool.fd, source.geometry.row_count);
  for (const auto& step : steps) uses->append(step);
  const u64 lines = seed % 4 * 2000;
  std::shared_ptr<AnnexPlan> plan =
      packs::plan_annex(*uses, source.geometry, {lines, 8192, 64 << 10}, *workers, [] {});

  std::vector<std::string> paths;
  for (const auto& file : source.files) paths.push_back(file->path);
  io::Options options;
  options.depth = 16;
  options.threads = 2;
  options.direct = false;
  auto engine = io::open_engine(kind, {paths.begin(), paths.end() - 1}, options);
  cache::CacheOptions cache_options;
  cache_options.lines = 500;
  PageCache cache(engine, workers, source.geometry, cache_options);
  std::atomic<bool> stop{false};
  std::atomic<size_t> wrong{0};
  std::thread other([&] {
    Random own(99);
    while (!stop) {
      std::vector<i64> ids(50);
      for (i64& id : ids) id = static_cast<i64>(own() % source.geometry.row_count);
      std::vector<std::byte> out(ids.size() * row_bytes);
      CHECK(cache.read_through(ids, out.data(), [] {}).empty());
      for (size_t i = 0; i < ids.size(); ++i)
        wrong += std::memcmp(&out[i * row_bytes], source.row(static_cast<u64>(ids[i])), row_bytes) != 0;
    }
  });
  {
    auto writer = std::make_shared<packs::Writer>(std::vector<int>{source.files.back()->fd}, 3, 20, 8192);
    AnnexSweep sweep(engine, writer, std::make_shared<cache::Workers>(3), uses, plan, {4, 1024});
    while (!sweep.wait_for(1000)) {}
    CHECK_EQUAL(sweep.result().error, 0);
  }
  auto runs = io::open_engine(kind, {paths.back()}, options);
  cache::RowForm form;
  form.row_bytes = row_bytes;
  auto memory = std::make_shared<RunMemory>(lines, row_bytes, 3, 32 << 10, true);
  {
    RunReader left(runs, workers, memory, uses, plan, form);  // with reads in flight
  }
  runs->inject_faults({{0, 512 * 90, EINTR, 2}, {0, 512 * 200, EAGAIN, 1}});
  RunReader reader(runs, workers, memory, uses, plan, form);
  CHECK_EQUAL(play(source, reader, steps), 0u);
  runs->inject_faults({{0, 0, EIO, 100}});
  RunReader faulty(runs, workers, memory, uses, plan, form);
  std::vector<std::byte> out(uses->longest() * row_bytes);
  RunReader::Result result;
  while (!result.error) result = faulty.read(out.data(), [] {});  // of the first step that reads
  CHECK_EQUAL(result.error, EIO);
  stop = true;
  other.join();
  CHECK_EQUAL(wrong.load(), 0u);
}

void a_cancelled_sweep_and_a_closed_engine_end(const std::string& dir) {
  const Source source(dir, 512, 512, 4000, 1);
  const File spool(dir + "/spool");
  cache::Workers workers(2);
  auto uses = std::make_shared<Uses>(spool.fd, source.geometry.row_count);
  std::vector<u32> rows(4000);
  for (u32 i = 0; i < rows.size(); ++i) rows[i] = i;
  uses->append(rows);
  const std::shared_ptr<AnnexPlan> plan = packs::plan_annex(*uses, source.geometry, {0, 4096, 4096}, workers, [] {});
  auto engine = io::open_engine("threads", {source.files[0]->path}, {.depth = 2, .direct = false});
  auto writer = std::make_shared<packs::Writer>(std::vector<int>{source.files.back()->fd}, 1, 2, 4096);
  for (int i = 0; i < 5; ++i) {
    const auto cancel = std::make_shared<packs::Cancel>();
    AnnexSweep sweep(engine, writer, std::make_shared<cache::Workers>(2), uses, plan, {2, 0, {}, cancel});
    if (i == 3) engine->close();
    else if (i) cancel->wanted = true;
    while (!sweep.wait_for(1000)) {}
    CHECK(sweep.result().error == 0 || sweep.result().error == ECANCELED);
  }
}

}  // namespace

int main(int, char** argv) {
  for (u64 seed = 0; seed < 4; ++seed) every_row(argv[1], seed % 2 ? "threads" : "auto", seed);
  a_cancelled_sweep_and_a_closed_engine_end(argv[1]);
}
