// sources: io/*.cpp cache/*.cpp store/crc32c.cpp store/mapped_file.cpp
// The cache on a real file: planned ahead, with faults, while another thread reads through it and streams
// are cut off in the middle. Every row delivered equals the file's. Argument: a directory to work in.
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

#include "cache/page_cache.h"
#include "check.h"

using namespace gids;
using cache::CacheOptions;
using cache::Geometry;
using cache::PageCache;
using cache::Policy;

namespace {

struct Source {
  Geometry geometry;
  std::vector<u64> rows;  // geometry.row_bytes each
  std::string path;

  Source(const std::string& directory, u32 row_bytes, u32 page_bytes, u64 row_count) {
    const u32 per_page = page_bytes / row_bytes;
    geometry = {row_count, row_bytes, page_bytes, per_page, 1, 0};
    rows.resize(row_count * row_bytes / 8);
    std::mt19937_64 random(row_bytes);
    for (u64& v : rows) v = random();
    path = directory + "/rows-" + std::to_string(row_bytes);
    std::vector<char> page(page_bytes);
    std::ofstream out(path, std::ios::binary);
    for (u64 p = 0; p < geometry.page_count(); ++p) {
      const u64 first = p * per_page, n = std::min<u64>(per_page, row_count - first);
      std::fill(page.begin(), page.end(), 0);
      std::memcpy(page.data(), row(first), n * row_bytes);
      out.write(page.data(), page_bytes);
    }
  }
  const std::byte* row(u64 id) const {
    return reinterpret_cast<const std::byte*>(rows.data()) + id * geometry.row_bytes;
  }
};

struct Minibatch {
  std::vector<i64> ids;
  std::vector<std::byte> out;
};

Minibatch sample(const Source& source, std::mt19937_64& random) {
  Minibatch m;
  const u64 n = random() % 120;
  for (u64 i = 0; i < n; ++i) {
    const double r = static_cast<double>(random() >> 11) / 9007199254740992.0;
    m.ids.push_back(static_cast<i64>(static_cast<double>(source.geometry.row_count) * r * r));
  }
  m.out.resize(n * source.geometry.row_bytes);
  return m;
}

size_t wrong_rows(const Source& source, const Minibatch& m) {
  size_t wrong = 0;
  for (size_t i = 0; i < m.ids.size(); ++i)
    wrong += std::memcmp(m.out.data() + i * source.geometry.row_bytes, source.row(static_cast<u64>(m.ids[i])),
                         source.geometry.row_bytes) != 0;
  return wrong;
}

CacheOptions options_of(u32 lines) {
  CacheOptions options;
  options.lines = lines;
  return options;
}

void streams(const Source& source, Policy policy, u32 lines, bool faults) {
  io::Options io_options;
  io_options.depth = 8;
  io_options.threads = 3;
  io_options.max_read_bytes = source.geometry.page_bytes;
  io_options.direct = false;
  auto engine = io::open_engine("threads", {source.path}, io_options);
  CacheOptions options = options_of(lines);
  options.policy = policy;
  PageCache cache(engine, std::make_shared<cache::Workers>(2), source.geometry, options);
  if (faults) engine->inject_faults({{0, 0, EIO, 40}, {0, 3 * source.geometry.page_bytes, EIO, 3}});

  std::atomic<bool> stop{false};
  std::atomic<size_t> wrong{0};
  std::thread other([&] {
    std::mt19937_64 random(99);
    while (!stop) {
      Minibatch m = sample(source, random);
      if (cache.read_through(m.ids, m.out.data(), [] {}).empty()) wrong += wrong_rows(source, m);
    }
  });

  std::mt19937_64 random(lines);
  constexpr u64 window = 5, planned = 3;
  size_t failed = 0;
  for (int stream = 0; stream < 2; ++stream) {
    const u64 first = cache.planner().entered(), count = 40;
    std::vector<Minibatch> batches;
    for (u64 i = 0; i < count; ++i) batches.push_back(sample(source, random));
    const u64 stop_at = stream % 2 ? count : 10 + random() % 20;
    u64 entered = 0, plans = 0;
    for (u64 t = 0; t < stop_at; ++t) {
      for (; plans < std::min(count, t + planned); ++plans) {
        for (; entered < std::min(count, plans + 1 + window); ++entered)
          cache.enter(first + entered, batches[entered].ids);
        cache.plan(first + plans, batches[plans].ids, batches[plans].out.data());
      }
      cache.gather_ready(first + t);
      while (!cache.wait_for(first + t, 1000)) {}
      if (cache.gather_rest(first + t, [] {}).empty()) wrong += wrong_rows(source, batches[t]);
      else ++failed;
      cache.retire(first + t);
    }
    cache.cancel();
    for (u64 w : cache.planner().words()) CHECK(word::uses_of(w) == 0);
  }
  stop = true;
  other.join();
  cache.planner().audit();
  CHECK(wrong == 0);
  CHECK(faults || failed == 0);
}

// Keeps the engine's only thread until it is opened.
class Held final : public io::Batch {
 public:
  Held() { reads = {{0, nullptr, 512, 0, 0}}; }
  void done(const io::Read&, const std::byte*, int) noexcept override {
    busy = true;
    while (!open.load()) std::this_thread::yield();
  }
  std::atomic<bool> busy{false}, open{false};
};

struct Rig {
  explicit Rig(const Source& s,
               io::Options options = {.depth = 1, .threads = 1, .max_read_bytes = 512, .direct = false})
      : source(s),
        engine(io::open_engine("threads", {s.path}, options)),
        cache(engine, std::make_shared<cache::Workers>(1), s.geometry, options_of(40)) {
    for (i64 id = 0; id < 60; ++id) minibatch.ids.push_back(id * 3);
    minibatch.out.resize(60 * s.geometry.row_bytes);
  }
  void plan(u64 step) {
    cache.enter(step, minibatch.ids);
    cache.plan(step, minibatch.ids, minibatch.out.data());
  }
  void check_that_nothing_is_marked_or_loading() {
    for (u64 w : cache.planner().words()) CHECK(word::uses_of(w) == 0 && word::state_of(w) != PageState::loading);
    cache.planner().audit();
  }
  const Source& source;
  std::shared_ptr<io::Engine> engine;
  PageCache cache;
  Minibatch minibatch;
};

void interruptions_leave_nothing_behind(const Source& source) {
  struct Interrupt {};
  auto interrupt = [] { throw Interrupt(); };
  Rig rig(source);
  auto interrupted = [&](auto call) {
    auto held = std::make_shared<Held>();
    rig.engine->submit(held);
    while (!held->busy) std::this_thread::yield();
    try {
      call();
    } catch (const Interrupt&) {
      held->open = true;
      held->wait();
      return true;
    }
    return false;
  };
  Minibatch& m = rig.minibatch;
  CHECK(interrupted([&] { rig.cache.read_through(m.ids, m.out.data(), interrupt); }));
  rig.check_that_nothing_is_marked_or_loading();

  rig.engine->inject_faults({{0, 0, EIO, 1}});
  rig.plan(0);
  auto gather = [&](const std::function<void()>& check) {
    rig.cache.gather_ready(0);
    while (!rig.cache.wait_for(0, 1000)) {}
    return rig.cache.gather_rest(0, check);
  };
  while (!rig.cache.wait_for(0, 1000)) {}
  CHECK(interrupted([&] { gather(interrupt); }));
  CHECK(gather(interrupt).empty());  // it may be gathered again, uninterrupted
  CHECK(wrong_rows(source, m) == 0);
  rig.cache.retire(0);
  rig.check_that_nothing_is_marked_or_loading();
}

template <class F> bool refused(const F& call) {
  try {
    call();
  } catch (const std::exception&) {
    return true;
  }
  return false;
}

void loads_that_cannot_be_submitted_are_given_back(const Source& source) {
  Rig rig(source);
  rig.engine->close();
  CHECK(refused([&] { rig.plan(0); }));
  CHECK_EQUAL(rig.cache.cancel(), 1u);
  rig.check_that_nothing_is_marked_or_loading();
}

void an_engine_that_does_not_fit_is_refused(const Source& source) {
  CHECK(refused([&] { Rig(source, {.max_read_bytes = 511, .direct = false}); }));
  Source elsewhere = source;
  elsewhere.geometry.first_file = 1;
  CHECK(refused([&] { Rig{elsewhere}; }));
}

}  // namespace

int main(int, char** argv) {
  const Source wide(argv[1], 512, 512, 300), narrow(argv[1], 72, 512, 900);
  for (Policy policy : {Policy::lookahead, Policy::window_pin, Policy::random, Policy::lru, Policy::fixed})
    for (const Source* source : {&wide, &narrow})
      for (u32 lines : {0u, 20u, 400u})
        for (bool faults : {false, true}) streams(*source, policy, lines, faults);
  interruptions_leave_nothing_behind(wide);
  loads_that_cannot_be_submitted_are_given_back(wide);
  an_engine_that_does_not_fit_is_refused(wide);
}
