// sources: io/*.cpp store/crc32c.cpp store/mapped_file.cpp
// The service thread on real engines and real files, and when things go wrong: completions lost, late or held,
// closing with requests in flight, corrupt pages, broken and abandoned queues. Argument: a directory to work in.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "controller.h"
#include "io/clock.h"
#include "io/queue_memory.h"
#include "io/queue_service.h"
#include "store/crc32c.h"

using namespace gids;

namespace {

constexpr u32 kPageBytes = 4096;
constexpr u32 kSlow = 60'000;  // a time-out that no test meets
constexpr u64 kNever = 600'000'000'000;  // a spin limit that no test meets
std::vector<std::string> g_paths;
std::vector<std::vector<u8>> g_contents;

void make_files(const std::string& dir) {
  std::mt19937_64 random(11);
  for (const u64 bytes : {100u, 99u, 40u}) {
    std::vector<u8> content(bytes * kPageBytes);
    for (u8& b : content) b = static_cast<u8>(random());
    g_paths.push_back(dir + "/shard-" + std::to_string(g_paths.size()) + ".bin");
    std::ofstream(g_paths.back(), std::ios::binary)
        .write(reinterpret_cast<const char*>(content.data()), static_cast<std::streamsize>(content.size()));
    g_contents.push_back(std::move(content));
  }
}

// Table 0: pages of 4096 B over files 0 and 1. Table 1: pages of 512 B in file 2, and some beyond its end.
const std::vector<io::QueueTable> kTables = {{199, 0, 2, 4096}, {40 * 8 + 5, 2, 1, 512}};

const u8* content(queue::Request r) {
  const io::QueueTable& t = kTables[queue::table_of(r)];
  const u64 page = queue::page_of(r);
  const auto& file = g_contents[t.first_file + page % t.file_count];
  const u64 offset = page / t.file_count * t.page_bytes;
  return offset < file.size() ? &file[offset] : nullptr;
}

struct Rig {
  Rig(std::shared_ptr<io::Engine> e, u64 depth, u32 rounds_max = 1, u32 timeout_ms = kSlow, u64 spin_ns = kNever,
      const std::vector<io::QueueTable>& tables = kTables)
      : memory({.staging_bytes = depth * kPageBytes, .rounds_max = rounds_max, .spin_ns = spin_ns}),
        local(memory.local_bytes()),
        engine(std::move(e)),
        q(memory.pair(0, local.data())) {
    service = std::make_unique<io::QueueService>(engine, tables, std::vector{q}, memory.shared(), timeout_ms);
  }
  // The two kernels of wait `stream`, by one thread.
  u64 post(const std::vector<queue::Request>& requests) {
    const u64 round = service->arm(0);
    queue::post_round(q, requests.data(), requests.size(), 0, 1);
    queue::end_round(q, round, requests.size(), 1);
    return round;
  }
  std::vector<int> collect(u64 round, const std::vector<queue::Request>& requests) {
    std::vector<int> errors;
    std::vector<u8> page(kPageBytes);
    for (u64 i = 0; i < requests.size(); ++i) {
      const u32 bytes = kTables[queue::table_of(requests[i])].page_bytes;
      errors.push_back(queue::collect_page(q, round, i, queue::Warp{}, page.data(), bytes));
    }
    return errors;
  }
  std::vector<int> run(const std::vector<queue::Request>& requests) {
    const u64 round = post(requests);
    CHECK(queue::await_round(q, round));
    return collect(round, requests);
  }

  io::QueueMemory memory;
  std::vector<std::byte> local;
  std::shared_ptr<io::Engine> engine;
  queue::Pair q;
  std::unique_ptr<io::QueueService> service;
};

std::vector<queue::Request> pages(u64 begin, u64 end) {
  std::vector<queue::Request> r;
  for (u64 p = begin; p < end; ++p) r.push_back(queue::request(0, p));
  return r;
}

template <class Condition> void eventually(const Condition& condition) {
  for (int i = 0; i < 20'000 && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(condition());
}

template <class Error> void throws(const std::string& text, const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    if (std::string(e.what()).find(text) == std::string::npos) std::fprintf(stderr, "%s\n", e.what());
    CHECK(std::string(e.what()).find(text) != std::string::npos);
    return;
  }
  CHECK(!"nothing was thrown");
}

std::shared_ptr<io::Engine> open_real(const std::string& kind) {
  io::Options options;
  options.depth = 32;
  options.threads = kind == "threads" ? 4 : 0;
  try {
    return io::open_engine(kind, g_paths, options);
  } catch (const std::system_error&) {  // no O_DIRECT on this file system
    options.direct = false;
    return io::open_engine(kind, g_paths, options);
  }
}

void pages_read_by_a_real_engine_equal_the_file(const std::string& kind) {
  std::vector<queue::Request> requests;
  for (u32 table = 0; table < 2; ++table)
    for (u64 p = 0; p < kTables[table].page_count; ++p) requests.push_back(queue::request(table, p));
  std::mt19937_64 random(5);
  std::shuffle(requests.begin(), requests.end(), random);
  std::vector<std::vector<u8>> got(requests.size());
  std::vector<int> errors(requests.size(), -1);
  auto bytes_of = [&](u64 i) { return kTables[queue::table_of(requests[i])].page_bytes; };
  auto check = [&] {
    for (u64 i = 0; i < requests.size(); ++i) {
      const u8* wanted = content(requests[i]);
      CHECK_EQUAL(errors[i], wanted ? 0 : ENODATA);
      if (wanted) CHECK(std::memcmp(got[i].data(), wanted, bytes_of(i)) == 0);
      got[i].assign(bytes_of(i), 0);
    }
  };
  for (u64 i = 0; i < requests.size(); ++i) got[i].resize(bytes_of(i));

  for (const u32 rounds_max : {1u, 2u}) {
    Rig rig(open_real(kind), 64, rounds_max);
    for (u64 first = 0; first < requests.size();) {
      const u64 size = queue::round_size(rig.q, requests.size(), first);
      const auto begin = requests.begin() + static_cast<i64>(first);
      const u64 round = rig.post({begin, begin + static_cast<i64>(size)});
      CHECK(queue::await_round(rig.q, round));
      for (u64 i = first; i < first + size; ++i)
        errors[i] = queue::collect_page(rig.q, round, i - first, queue::Warp{}, got[i].data(), bytes_of(i));
      first += size;
    }
    check();
  }
  Rig rig(open_real(kind), 8);
  const u64 round = rig.service->arm(0);
  std::vector<std::thread> warps;
  for (u64 k = 0; k < 6; ++k)
    warps.emplace_back([&, k] {
      for (u64 i = k; i < requests.size(); i += 6)
        errors[i] = queue::read_page(rig.q, requests[i], queue::Warp{}, got[i].data(), bytes_of(i));
      queue::end_round(rig.q, round, 0, 6);
    });
  for (std::thread& t : warps) t.join();
  CHECK(queue::await_round(rig.q, round));
  check();
}

void a_lost_completion_ends_in_an_error_after_the_time_out() {
  const auto engine = Controller::open(g_paths, {.lose_page = 3});
  Rig rig(engine, 8, 1, 300);
  const u64 begin = io::now_ns();
  const std::vector<int> errors = rig.run(pages(0, 8));  // page 6 is the page 3 of file 0
  CHECK(io::now_ns() - begin >= 300'000'000);
  for (u64 i = 0; i < 8; ++i) CHECK_EQUAL(errors[i], i == 6 ? ETIMEDOUT : 0);

  // While the engine may still write to the slot's staging page, the slot serves nobody else; the others do.
  const std::vector<int> again = rig.run(pages(10, 18));
  for (u64 i = 0; i < 8; ++i) CHECK_EQUAL(again[i], i == 6 ? ETIMEDOUT : 0);
  CHECK_EQUAL(rig.service->stats().late, 0u);

  engine->find();
  eventually([&] { return rig.service->stats().late == 1; });
  for (const int error : rig.run(pages(20, 28))) CHECK_EQUAL(error, 0);
  const io::QueueStats stats = rig.service->stats();
  CHECK_EQUAL(stats.taken, 24u);
  CHECK_EQUAL(stats.failed, 2u);
  CHECK_EQUAL(stats.timed_out, 1u);
}

void a_lane_whose_completion_is_lost_gets_the_error_and_frees_its_slot() {
  const auto engine = Controller::open(g_paths, {.lose_page = 0});
  Rig rig(engine, 2, 1, 200);
  const u64 round = rig.service->arm(0);
  std::vector<u8> page(kPageBytes);
  CHECK_EQUAL(queue::read_page(rig.q, queue::request(0, 0), queue::Warp{}, page.data(), kPageBytes), ETIMEDOUT);
  for (u64 p = 1; p < 9; ++p) {
    const int error = queue::read_page(rig.q, queue::request(0, p), queue::Warp{}, page.data(), kPageBytes);
    CHECK_EQUAL(error, p % 2 ? 0 : ETIMEDOUT);  // the lost read still has slot 0
  }
  queue::end_round(rig.q, round, 0, 1);
  CHECK(queue::await_round(rig.q, round));
}

// Seconds that a call takes.
template <class F> double seconds(F&& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void a_wait_that_nobody_ends_gives_up() {
  const auto engine = Controller::open(g_paths, {.hold = true});
  Rig rig(engine, 8, 1, kSlow, 100'000'000);
  const u64 round = rig.post(pages(0, 4));
  eventually([&] { return engine->lost() == 4; });
  const double waited = seconds([&] { CHECK(!queue::await_round(rig.q, round)); });
  CHECK(waited >= 0.2 && waited < 10);  // 0.1 s, and as long again for the service to close
  CHECK(rig.service->broken());
  for (const int error : rig.collect(round, pages(0, 4))) CHECK_EQUAL(error, ETIMEDOUT);
  engine->find();
}

void closing_releases_the_waiters_of_requests_in_flight() {
  std::weak_ptr<std::byte> staging;
  const auto engine = Controller::open(g_paths, {.hold = true}, 4);
  {
    Rig rig(engine, 64, 2, 200);
    staging = rig.memory.shared();
    const auto requests = pages(0, 20);
    const u64 begin = io::now_ns(), round = rig.post(requests);
    eventually([&] { return rig.service->stats().taken == 20 && engine->lost() == 4; });
    const u64 never_rung = rig.service->arm(0);
    std::thread stream([&] { CHECK(queue::await_round(rig.q, never_rung)); });
    const bool late = io::now_ns() - begin > 100'000'000;  // so that what was not issued may time out before it closes
    rig.service->close();
    stream.join();
    CHECK(queue::read_completed(rig.q) == queue::closed);
    int timed_out = 0;
    for (const int error : rig.collect(round, requests)) {
      CHECK(error == ECANCELED || error == ETIMEDOUT);  // not issued; issued, and held for longer than the time-out
      timed_out += error == ETIMEDOUT;
    }
    CHECK(timed_out == 4 || (timed_out > 4 && late));
    CHECK_EQUAL(rig.service->stats().failed, 20u);
    rig.service->close();
    throws<std::runtime_error>("the request queue is closed", [&] { rig.service->arm(0); });
  }
  // The service and its owner are gone, but not the memory that the engine still may write to.
  CHECK(!staging.expired());
  engine->find();
  eventually([&] { return staging.expired(); });
}

void closing_lets_issued_reads_end_and_cancels_what_nobody_took() {
  const auto engine = Controller::open(g_paths, {.hold = true});
  Rig rig(engine, 8);
  const auto requests = pages(0, 8);
  const u64 round = rig.post(requests);
  eventually([&] { return engine->lost() == 8; });
  std::thread closing([&] { rig.service->close(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(queue::read_completed(rig.q) < queue::closed);
  engine->find();
  closing.join();
  for (const int error : rig.collect(round, requests)) CHECK_EQUAL(error, 0);

  std::vector<u8> page(kPageBytes);
  CHECK_EQUAL(queue::read_page(rig.q, queue::request(0, 1), queue::Warp{}, page.data(), kPageBytes), ECANCELED);
}

void closing_releases_lanes_that_go_on_posting() {
  const auto engine = Controller::open(g_paths, {.stall_one_in = 3, .shuffle = true}, 4);
  Rig rig(engine, 4);
  rig.service->arm(0);
  std::atomic<int> fine{0}, canceled{0};
  std::vector<std::thread> lanes;
  for (int k = 0; k < 8; ++k)
    lanes.emplace_back([&] {
      std::vector<u8> page(kPageBytes);
      for (u64 p = 0;; ++p) {
        const int error = queue::read_page(rig.q, queue::request(0, p % 100), queue::Warp{}, page.data(), kPageBytes);
        ++(error ? canceled : fine);
        if (error) CHECK_EQUAL(error, ECANCELED);
        if (error) return;
      }
    });
  eventually([&] { return fine > 100; });
  rig.service->close();
  for (std::thread& t : lanes) t.join();
  CHECK_EQUAL(canceled.load(), 8);
}

void a_closed_engine_cancels_the_requests() {
  Rig rig(open_real("threads"), 8);
  rig.engine->close();
  for (const int error : rig.run(pages(0, 8))) CHECK_EQUAL(error, ECANCELED);
}

void a_page_whose_checksum_is_wrong_is_an_error_of_its_own() {
  std::vector<u32> sums;
  for (u64 p = 0; p < kTables[0].page_count; ++p)
    sums.push_back(store::crc32c(reinterpret_cast<const std::byte*>(content(queue::request(0, p))), kPageBytes));
  sums[3] ^= 1;
  sums[150] ^= u32{1} << 31;
  std::vector<io::QueueTable> tables = kTables;
  tables[0].checksums = sums.data();
  Rig rig(open_real("threads"), 64, 1, kSlow, kNever, tables);
  for (u64 first = 0; first < kTables[0].page_count; first += 64) {
    const u64 end = std::min(first + 64, kTables[0].page_count);
    const std::vector<int> errors = rig.run(pages(first, end));
    for (u64 p = first; p < end; ++p) CHECK_EQUAL(errors[p - first], p == 3 || p == 150 ? EBADMSG : 0);
  }
  for (const int error : rig.run({queue::request(1, 7)})) CHECK_EQUAL(error, 0);
  CHECK_EQUAL(rig.service->stats().corrupt, 2u);
  CHECK_EQUAL(rig.service->stats().failed, 2u);
}

void a_doorbell_without_its_entries_is_an_error() {
  Rig rig(Controller::open(g_paths, {}), 8);
  const u64 round = rig.service->arm(0);
  const auto requests = pages(0, 4);
  queue::post_round(rig.q, requests.data(), 3, 0, 1);
  queue::end_round(rig.q, round, 4, 1);
  CHECK(queue::await_round(rig.q, round));
  const std::vector<int> errors = rig.collect(round, requests);
  for (u64 i = 0; i < 4; ++i) CHECK_EQUAL(errors[i], i == 3 ? EPROTO : 0);
  for (const int error : rig.run(pages(0, 8))) CHECK_EQUAL(error, 0);
}

void a_lane_gives_up_when_nobody_serves() {
  Rig rig(Controller::open(g_paths, {}), 2, 1, kSlow, 100'000'000);
  eventually([&] { return rig.service->stats().sleeps > 0; });  // and sleeps on, for nothing is armed
  std::vector<u8> page(kPageBytes);
  const auto read = [&] {
    return queue::read_page(rig.q, queue::request(0, 0), queue::Warp{}, page.data(), kPageBytes);
  };
  CHECK(!rig.service->broken());
  const double waited = seconds([&] { CHECK_EQUAL(read(), ETIMEDOUT); });
  CHECK(waited >= 0.1 && waited < 10);
  CHECK_EQUAL(read(), ECANCELED);  // the first slot still belongs to a request that may be answered: all is over
  CHECK(rig.service->broken());
  throws<std::runtime_error>("the request queue is broken", [&] { rig.service->arm(0); });
}

void a_queue_that_somebody_gave_up_releases_everybody_else() {
  const auto engine = Controller::open(g_paths, {.hold = true});
  Rig rig(engine, 8, 2, 100);
  const u64 posted = rig.post(pages(0, 4));
  eventually([&] { return engine->lost() == 4; });
  const u64 armed = rig.service->arm(0);
  std::thread stream([&] { CHECK(queue::await_round(rig.q, armed)); });
  queue::abandon(rig.q);
  stream.join();  // the service closed by itself
  for (const int error : rig.collect(posted, pages(0, 4))) CHECK_EQUAL(error, ETIMEDOUT);
  std::vector<u8> page(kPageBytes);
  CHECK_EQUAL(queue::read_page(rig.q, queue::request(0, 0), queue::Warp{}, page.data(), kPageBytes), ECANCELED);
  rig.service->close();
  engine->find();
}

void what_became_of_a_broken_round_does_not_change_any_more() {
  int broken = 0;
  for (int trial = 0; trial < 100; ++trial) {
    const auto engine = Controller::open(g_paths, {.stall_one_in = 2, .shuffle = true}, 4);
    Rig rig(engine, 64, 1, kSlow, 250'000u << trial % 4);
    const auto requests = pages(0, 64);
    const u64 round = rig.post(requests);
    if (!queue::await_round(rig.q, round)) continue;  // gave up on the service's end too
    broken += rig.service->broken();
    const std::vector<int> errors = rig.collect(round, requests);
    rig.service->close();
    const std::vector<int> later = rig.collect(round, requests);
    CHECK(errors == later);
    for (const int error : errors) CHECK(error == 0 || (rig.service->broken() && error == ECANCELED));
  }
  std::printf("%d of 100 rounds broken\n", broken);
}

void a_device_sees_the_same_memory_at_its_own_addresses() {
  const io::QueueMemory memory({.staging_bytes = 1 << 20, .pairs = 3});
  std::vector<std::byte> local(memory.local_bytes());
  const auto host = reinterpret_cast<uintptr_t>(memory.shared().get());
  const auto own = reinterpret_cast<uintptr_t>(local.data());
  constexpr u64 kShift = u64{1} << 40;
  for (u32 p = 0; p < 3; ++p) {
    const queue::Pair q = memory.pair(p, local.data()), device = memory.pair(p, host + kShift, own + 2 * kShift);
    const auto at = [](const void* a) { return reinterpret_cast<uintptr_t>(a); };
    CHECK(at(device.entries) == at(q.entries) + kShift && at(device.rung) == at(q.rung) + kShift);
    CHECK(at(device.statuses) == at(q.statuses) + kShift && at(device.staging) == at(q.staging) + kShift);
    CHECK(at(device.completed) == at(q.completed) + kShift && at(device.abandoned) == at(q.abandoned) + kShift);
    CHECK(at(device.head) == at(q.head) + 2 * kShift && at(device.turns) == at(q.turns) + 2 * kShift);
    CHECK(at(q.staging) >= host && at(q.staging + q.depth() * q.slot_bytes) <= host + memory.shared_bytes());
    CHECK(at(q.head) >= own && at(q.turns + q.depth()) <= own + memory.local_bytes());
    CHECK_EQUAL(device.round_max, q.round_max);
  }
}

void the_thread_sleeps_while_nothing_is_armed() {
  Rig rig(Controller::open(g_paths, {}), 8);
  eventually([&] { return rig.service->stats().sleeps > 0; });
  const u64 before = rig.service->stats().sleeps;
  for (const int error : rig.run(pages(0, 8))) CHECK_EQUAL(error, 0);
  eventually([&] { return rig.service->stats().sleeps > before; });
  eventually([&] {
    const u64 now = rig.service->stats().sleeps;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return rig.service->stats().sleeps == now;
  });
}

// Wait `warp`: nothing waits for empty rounds, so the service may see none before all are rung.
void more_empty_rounds_than_doorbells_are_complete() {
  Rig rig(Controller::open(g_paths, {}), 8);
  constexpr u64 kRounds = 2 * queue::doorbells + 5;
  eventually([&] { return rig.service->stats().sleeps > 0; });
  for (u64 round = 0; round < kRounds; ++round) queue::end_round(rig.q, round, 0, 1);
  for (u64 round = 0; round < kRounds; ++round) CHECK_EQUAL(rig.service->arm(0), round);
  eventually([&] { return rig.service->stats().rounds == kRounds; });  // then it sleeps
  for (const int error : rig.run(pages(0, 8))) CHECK_EQUAL(error, 0);
}

void what_does_not_fit_is_refused() {
  const auto engine = Controller::open(g_paths, {});
  const io::QueueMemory memory({.staging_bytes = 1 << 20, .slot_bytes = 512});
  std::vector<std::byte> local(memory.local_bytes());
  const std::vector<queue::Pair> pairs = {memory.pair(0, local.data())};
  const auto serve = [&](std::vector<io::QueueTable> tables, const std::vector<queue::Pair>& p) {
    io::QueueService(engine, std::move(tables), p, memory.shared());
  };
  throws<std::invalid_argument>("table 0 has pages of 4096 B; the staging slots hold 512 B",
                                [&] { serve(kTables, pairs); });
  throws<std::invalid_argument>("at least one queue pair", [&] { serve({}, {}); });
  throws<std::invalid_argument>("table 0 has no files", [&] { serve({{1, 0, 0, 512}}, pairs); });
  throws<std::invalid_argument>("more than 2^48 pages", [&] { serve({{~u64{0}, 0, 1, 512}}, pairs); });
  throws<std::invalid_argument>("more bytes than any file", [&] { serve({{u64{1} << 48, 0, 1, 1u << 31}}, pairs); });
  throws<std::invalid_argument>("has files 1 to 3; the engine has 3", [&] { serve({{8, 1, 3, 512}}, pairs); });
  io::Options options;
  options.max_read_bytes = 512;
  options.direct = false;
  const io::QueueMemory long_pages({.staging_bytes = 1 << 20});
  throws<std::invalid_argument>("table 0 has pages of 4096 B; the engine was opened for reads of 512 B", [&] {
    io::QueueService(io::open_engine("threads", g_paths, options), kTables, {long_pages.pair(0, local.data())},
                     long_pages.shared());
  });
  const auto make = [](io::QueueOptions options) { io::QueueMemory{options}; };
  throws<std::invalid_argument>("(got 24)", [&] { make({.slot_bytes = 24}); });
  throws<std::invalid_argument>("staging_bytes is 4096; 1 pairs of at least 2 pages of 4096 B need 8192",
                                [&] { make({.staging_bytes = 4096}); });
  throws<std::invalid_argument>("rounds_max must be 1 to 64 (got 65)", [&] { make({.rounds_max = 65}); });
  throws<std::invalid_argument>("pairs must be 1 to 1024 (got 0)", [&] { make({.pairs = 0}); });
  throws<std::invalid_argument>("2^24 slots", [&] { make({.staging_bytes = u64{1} << 40}); });
  CHECK_EQUAL(io::QueueMemory({}).depth(), 65536u);
}

void a_forked_child_is_refused_and_ends() {
  auto rig = std::make_unique<Rig>(open_real("threads"), 8);
  const pid_t child = fork();
  if (child == 0) {
    throws<std::runtime_error>("before a fork", [&] { rig->service->arm(0); });
    rig.reset();
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  for (const int error : rig->run(pages(0, 8))) CHECK_EQUAL(error, 0);
}

// Each pair has a thread, if there are cores; a thread that sleeps hears that another pair is broken.
void every_pair_is_served_and_all_end_together() {
  io::QueueMemory memory({.staging_bytes = 5 * 16 * kPageBytes, .pairs = 5, .spin_ns = kNever});
  std::vector<std::byte> local(memory.local_bytes());
  std::vector<queue::Pair> q;
  for (u32 p = 0; p < 5; ++p) q.push_back(memory.pair(p, local.data()));
  io::QueueService service(open_real("threads"), kTables, q, memory.shared(), kSlow);
  std::vector<u8> page(kPageBytes);
  for (u32 turn = 0; turn < 3; ++turn) {
    for (u32 p = 0; p < 5; ++p) {
      const queue::Request request = queue::request(0, 10 * turn + p);
      const u64 round = service.arm(p);
      queue::post_round(q[p], &request, 1, 0, 1);
      queue::end_round(q[p], round, 1, 1);
      CHECK(queue::await_round(q[p], round));
      CHECK_EQUAL(queue::collect_page(q[p], round, 0, queue::Warp{}, page.data(), kPageBytes), 0);
      CHECK(std::memcmp(page.data(), content(request), kPageBytes) == 0);
    }
  }
  CHECK_EQUAL(service.stats().rounds, 15u);
  eventually([&] { return service.stats().sleeps > 0; });
  service.arm(3);  // its thread polls now
  queue::abandon(q[3]);
  for (const queue::Pair& pair : q) eventually([&] { return queue::read_completed(pair) == queue::closed; });
  CHECK(service.broken());
}

}  // namespace

int main(int, char** argv) {
  make_files(argv[1]);
  pages_read_by_a_real_engine_equal_the_file("threads");
  if (const std::string why = io::why_no_uring(); why.empty()) {
    pages_read_by_a_real_engine_equal_the_file("uring");
  } else {
    std::printf("uring not tested: %s\n", why.c_str());
  }
  a_lost_completion_ends_in_an_error_after_the_time_out();
  a_lane_whose_completion_is_lost_gets_the_error_and_frees_its_slot();
  a_wait_that_nobody_ends_gives_up();
  closing_releases_the_waiters_of_requests_in_flight();
  closing_lets_issued_reads_end_and_cancels_what_nobody_took();
  closing_releases_lanes_that_go_on_posting();
  a_closed_engine_cancels_the_requests();
  a_page_whose_checksum_is_wrong_is_an_error_of_its_own();
  a_doorbell_without_its_entries_is_an_error();
  a_lane_gives_up_when_nobody_serves();
  a_queue_that_somebody_gave_up_releases_everybody_else();
  what_became_of_a_broken_round_does_not_change_any_more();
  a_device_sees_the_same_memory_at_its_own_addresses();
  the_thread_sleeps_while_nothing_is_armed();
  more_empty_rounds_than_doorbells_are_complete();
  every_pair_is_served_and_all_end_together();
  what_does_not_fit_is_refused();
  a_forked_child_is_refused_and_ends();
}
