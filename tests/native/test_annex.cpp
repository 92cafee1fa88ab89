// sources: packs/*.cpp io/*.cpp cache/*.cpp store/crc32c.cpp store/mapped_file.cpp
// The annex on real files: planned by several threads, swept while the table is read at random, then read through the
// cache by merged reads, with injected faults. Every row delivered equals the table's. Argument: a directory to work
// in.
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
#include "packs/annex_sweep.h"

using namespace gids;
using cache::Geometry;
using cache::PageCache;
using packs::AnnexPlan;
using packs::AnnexSweep;
using packs::Uses;

namespace {

using Random = std::mt19937_64;
constexpr u64 annex_pages = 1 << 17;

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
      : geometry{row_count, row_bytes, page_bytes, page_bytes / row_bytes, shards, 0, annex_pages, shards, 1},
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
    CHECK(ftruncate(files.back()->fd, static_cast<off_t>(annex_pages * page_bytes)) == 0);
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
size_t play(const Source& source, PageCache& cache, const Uses& uses, const AnnexPlan& plan,
            const std::vector<std::vector<u32>>& steps) {
  constexpr u32 planned = 3, window = 2;
  const Geometry& g = source.geometry;
  std::vector<std::vector<i64>> positions(steps.size());
  std::vector<std::vector<std::byte>> outs(steps.size());
  size_t wrong = 0;
  u32 entered = 0, plans = 0;
  for (u32 t = 0; t < steps.size(); ++t) {
    for (; plans < std::min<size_t>(steps.size(), t + planned); ++plans) {
      for (; entered < std::min<size_t>(steps.size(), plans + 1 + window); ++entered) {
        std::vector<u32> slots(steps[entered].size());
        uses.read_rows(entered, 0, slots);
        for (const u32 slot : slots) positions[entered].push_back(static_cast<i64>(g.annex_row() + slot));
        std::vector<u8> keeps;
        for (u64 p = plan.first_page[entered]; p < plan.first_page[entered + 1]; ++p)
          keeps.push_back(plan.page_dies[p] > entered);
        cache.expect(plan.first_page[entered], keeps);
        cache.enter(entered, positions[entered]);
      }
      outs[plans].resize(steps[plans].size() * g.row_bytes);
      cache.plan(plans, positions[plans], outs[plans].data());
    }
    cache.gather_ready(t);
    while (!cache.wait_for(t, 1000)) {}
    CHECK(cache.gather_rest(t, [] {}).empty());
    for (size_t i = 0; i < steps[t].size(); ++i)
      wrong += std::memcmp(&outs[t][i * g.row_bytes], source.row(steps[t][i]), g.row_bytes) != 0;
    cache.retire(t);
    cache.forget(0, {plan.dying.data() + plan.dying_begin[t], plan.dying_begin[t + 1] - plan.dying_begin[t]});
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
  Uses uses(spool.fd, source.geometry.row_count);
  for (const auto& step : steps) uses.append(step);
  Geometry table = source.geometry;
  table.annex_pages = 0;
  std::shared_ptr<AnnexPlan> plan =
      packs::plan_annex(uses, table, {seed % 4 * 2000, 8192, 64 << 10}, *workers, [] {});

  std::vector<std::string> paths;
  for (const auto& file : source.files) paths.push_back(file->path);
  io::Options options;
  options.depth = 16;
  options.threads = 2;
  options.direct = false;
  options.staging_slots = 2;
  options.staging_bytes = 128 << 10;
  auto engine = io::open_engine(kind, paths, options);
  cache::CacheOptions cache_options;
  cache_options.lines = static_cast<u32>(plan->lines_needed(5)) / (1 + seed % 2);  // or too few
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
    AnnexSweep sweep(engine, writer, std::make_shared<cache::Workers>(3), plan, {4, 1024, 0, {}});
    while (!sweep.wait_for(1000)) {}
    CHECK_EQUAL(sweep.result().error, 0);
  }
  const u64 annex = source.geometry.annex_file;  // one of these fails with its merge, and is read again alone
  engine->inject_faults({{static_cast<u32>(annex), 512 * 7, EIO, 1}, {static_cast<u32>(annex), 512 * 90, EINTR, 2}});
  CHECK_EQUAL(play(source, cache, uses, *plan, steps), 0u);
  stop = true;
  other.join();
  CHECK_EQUAL(wrong.load(), 0u);
  cache.planner().audit();
  const auto words = cache.planner().words();
  for (u64 p = source.geometry.page_count(); p < words.size(); ++p)
    CHECK(word::state_of(words[p]) == PageState::absent);
}

void a_cancelled_sweep_and_a_closed_engine_end(const std::string& dir) {
  const Source source(dir, 512, 512, 4000, 1);
  const File spool(dir + "/spool");
  cache::Workers workers(2);
  auto plan_of = [&] {
    Uses uses(spool.fd, source.geometry.row_count);
    std::vector<u32> rows(4000);
    for (u32 i = 0; i < rows.size(); ++i) rows[i] = i;
    uses.append(rows);
    Geometry table = source.geometry;
    table.annex_pages = 0;
    return std::shared_ptr<AnnexPlan>(packs::plan_annex(uses, table, {0, 4096, 4096}, workers, [] {}));
  };
  auto engine = io::open_engine("threads", {source.files[0]->path}, {.depth = 2, .direct = false});
  auto writer = std::make_shared<packs::Writer>(std::vector<int>{source.files.back()->fd}, 1, 2, 4096);
  for (int i = 0; i < 5; ++i) {
    AnnexSweep sweep(engine, writer, std::make_shared<cache::Workers>(2), plan_of(), {2, 0, 0, {}});
    if (i == 3) engine->close();
    else if (i) sweep.cancel();
    while (!sweep.wait_for(1000)) {}
    CHECK(sweep.result().error == 0 || sweep.result().error == ECANCELED);
  }
}

}  // namespace

int main(int, char** argv) {
  for (u64 seed = 0; seed < 6; ++seed) every_row(argv[1], seed % 2 ? "threads" : "auto", seed);
  a_cancelled_sweep_and_a_closed_engine_end(argv[1]);
}
