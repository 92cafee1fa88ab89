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

const u8* content(u32 table, u64 page) {
  const io::QueueTable& t = kTables[table];
  const auto& file = g_contents[t.first_file + page % t.file_count];
  const u64 offset = page / t.file_count * t.page_bytes;
  return offset < file.size() ? &file[offset] : nullptr;
}

using Pages = std::vector<queue::Request>;

// round_max: pages of the longest table.
struct Rig {
  Rig(std::shared_ptr<io::Engine> e, u64 round_max, u32 rounds_max = 1, u32 timeout_ms = kSlow, u64 spin_ns = kNever,
      const std::vector<io::QueueTable>& tables = kTables)
      : memory({.staging_bytes = round_max * rounds_max * kPageBytes, .rounds_max = rounds_max, .spin_ns = spin_ns}),
        local(memory.local_bytes()),
        engine(std::move(e)),
        q(memory.pair(local.data())) {
    service = std::make_unique<io::QueueService>(engine, tables, q, memory.shared(), timeout_ms);
  }
  u64 post(const Pages& requests, u32 table = 0) {
    const u64 round = service->arm();
    queue::post_round(q, round, requests.data(), requests.size(), 0, 1);
    queue::end_round(q, round, table, requests.size(), 1);
    return round;
  }
  std::vector<int> errors(u64 round, u64 size) const {
    std::vector<int> errors;
    for (u64 i = 0; i < size; ++i) errors.push_back(queue::outcome(q.answer(round), round, i));
    return errors;
  }
  std::vector<int> run(const Pages& requests, u32 table = 0) {
    const u64 round = post(requests, table);
    CHECK(queue::await_round(q, round));
    return errors(round, requests.size());
  }

  io::QueueMemory memory;
  std::vector<std::byte> local;
  std::shared_ptr<io::Engine> engine;
  queue::Pair q;
  std::unique_ptr<io::QueueService> service;
};

Pages pages(u64 begin, u64 end) {
  Pages r;
  for (u64 p = begin; p < end; ++p) r.push_back(p);
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
  std::mt19937_64 random(5);
  for (const u32 rounds_max : {1u, 2u, 3u}) {
    Rig rig(open_real(kind), 50, rounds_max);
    for (const u32 table : {0u, 1u, 0u}) {
      const u32 bytes = kTables[table].page_bytes;
      Pages requests = pages(0, kTables[table].page_count);
      std::shuffle(requests.begin(), requests.end(), random);
      for (u64 first = 0, size; first < requests.size(); first += size) {
        size = queue::round_size(rig.q, requests.size(), first);
        const auto begin = requests.begin() + static_cast<i64>(first);
        const u64 round = rig.post({begin, begin + static_cast<i64>(size)}, table);
        CHECK(queue::await_round(rig.q, round));
        for (u64 i = 0; i < size; ++i) {  // short pages lie one after the other too
          const u8* wanted = content(table, requests[first + i]);
          CHECK_EQUAL(queue::outcome(rig.q.answer(round), round, i), wanted ? 0 : ENODATA);
          if (wanted) CHECK(std::memcmp(rig.q.pages(round) + i * bytes, wanted, bytes) == 0);
        }
      }
    }
  }
}

void a_lost_completion_ends_in_an_error_after_the_time_out() {
  const auto engine = Controller::open(g_paths, {.lose_page = 3});
  Rig rig(engine, 8, 1, 300);
  const u64 begin = io::now_ns();
  const std::vector<int> errors = rig.run(pages(0, 8));  // page 6 is the page 3 of file 0
  CHECK(io::now_ns() - begin >= 300'000'000);
  for (u64 i = 0; i < 8; ++i) CHECK_EQUAL(errors[i], i == 6 ? ETIMEDOUT : 0);

  // While the engine may still write to the place, it serves nobody: shorter pages would lie elsewhere in it.
  for (const int error : rig.run(pages(10, 18))) CHECK_EQUAL(error, ETIMEDOUT);
  for (const int error : rig.run(pages(0, 8), 1)) CHECK_EQUAL(error, ETIMEDOUT);
  CHECK_EQUAL(rig.service->stats().late, 0u);

  engine->find();
  eventually([&] { return rig.service->stats().late == 1; });
  for (const int error : rig.run(pages(20, 28))) CHECK_EQUAL(error, 0);
  const io::QueueStats stats = rig.service->stats();
  CHECK_EQUAL(stats.taken, 32u);
  CHECK_EQUAL(stats.failed, 17u);
  CHECK_EQUAL(stats.timed_out, 1u);
}

void a_lost_completion_does_not_keep_the_other_rounds() {
  const auto engine = Controller::open(g_paths, {.lose_page = 3});
  Rig rig(engine, 8, 2, 200);
  CHECK_EQUAL(rig.run(pages(0, 8))[6], ETIMEDOUT);
  for (const int error : rig.run(pages(10, 18))) CHECK_EQUAL(error, 0);
  for (const int error : rig.run(pages(10, 18))) CHECK_EQUAL(error, ETIMEDOUT);
  for (const int error : rig.run(pages(10, 18))) CHECK_EQUAL(error, 0);
  engine->find();
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
  for (const int error : rig.errors(round, 4)) CHECK_EQUAL(error, ETIMEDOUT);
  engine->find();
}

void closing_releases_the_waiters_of_requests_in_flight() {
  std::weak_ptr<std::byte> staging;
  const auto engine = Controller::open(g_paths, {.hold = true}, 4);
  {
    Rig rig(engine, 64, 2, 200);
    staging = rig.memory.shared();
    const auto requests = pages(0, 20);
    const u64 round = rig.post(requests);
    eventually([&] { return rig.service->stats().taken == 20 && engine->lost() == 4; });
    const u64 never_rung = rig.service->arm();
    std::thread stream([&] { CHECK(queue::await_round(rig.q, never_rung)); });
    rig.service->close();
    stream.join();
    for (const int error : rig.errors(round, 20)) CHECK_EQUAL(error, ECANCELED);
    CHECK_EQUAL(rig.service->stats().failed, 20u);
    rig.service->close();
    throws<std::runtime_error>("the request queue is closed", [&] { rig.service->arm(); });
  }
  // The service and its owner are gone, but not the memory that the engine still may write to.
  CHECK(!staging.expired());
  engine->find();
  eventually([&] { return staging.expired(); });
}

void closing_waits_for_issued_reads() {
  const auto engine = Controller::open(g_paths, {.hold = true});
  Rig rig(engine, 8);
  const u64 round = rig.post(pages(0, 8));
  eventually([&] { return engine->lost() == 8; });
  std::thread closing([&] { rig.service->close(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(!queue::is_answered(rig.q, round));
  engine->find();
  closing.join();
  CHECK_EQUAL(rig.service->stats().failed, 0u);
}

void a_closed_engine_cancels_the_requests() {
  Rig rig(open_real("threads"), 8);
  rig.engine->close();
  for (const int error : rig.run(pages(0, 8))) CHECK_EQUAL(error, ECANCELED);
}

void a_page_whose_checksum_is_wrong_is_an_error_of_its_own() {
  std::vector<u32> sums;
  for (u64 p = 0; p < kTables[0].page_count; ++p)
    sums.push_back(store::crc32c(reinterpret_cast<const std::byte*>(content(0, p)), kPageBytes));
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
  for (const int error : rig.run({7}, 1)) CHECK_EQUAL(error, 0);
  CHECK_EQUAL(rig.service->stats().corrupt, 2u);
  CHECK_EQUAL(rig.service->stats().failed, 2u);
}

void a_doorbell_without_its_entries_is_an_error() {
  Rig rig(Controller::open(g_paths, {}), 8);
  const u64 round = rig.service->arm();
  queue::post_round(rig.q, round, pages(0, 4).data(), 3, 0, 1);
  queue::end_round(rig.q, round, 0, 4, 1);
  CHECK(queue::await_round(rig.q, round));
  const std::vector<int> errors = rig.errors(round, 4);
  for (u64 i = 0; i < 4; ++i) CHECK_EQUAL(errors[i], i == 3 ? EPROTO : 0);
  for (const int error : rig.run(pages(0, 8))) CHECK_EQUAL(error, 0);
}

void rounds_without_such_a_table_fail_and_empty_ones_do_not() {
  Rig rig(Controller::open(g_paths, {}), 8, 2);
  for (const int error : rig.run(pages(0, 8), 2)) CHECK_EQUAL(error, EINVAL);
  CHECK(rig.run({}).empty() && rig.run({}, 7).empty());
  CHECK((rig.run({198, 199}) == std::vector<int>{0, EINVAL}));
}

void a_queue_that_somebody_gave_up_releases_everybody_else() {
  const auto engine = Controller::open(g_paths, {.hold = true});
  Rig rig(engine, 8, 2, 100);
  const u64 posted = rig.post(pages(0, 4));
  eventually([&] { return engine->lost() == 4; });
  const u64 armed = rig.service->arm();
  std::thread stream([&] { CHECK(queue::await_round(rig.q, armed)); });
  queue::abandon(rig.q);
  stream.join();  // the service closed by itself
  for (const int error : rig.errors(posted, 4)) CHECK_EQUAL(error, ECANCELED);
  CHECK(rig.service->broken());
  throws<std::runtime_error>("the request queue is broken", [&] { rig.service->arm(); });
  rig.service->close();
  engine->find();
}

void what_became_of_a_broken_round_does_not_change_any_more() {
  int broken = 0;
  for (int trial = 0; trial < 100; ++trial) {
    const auto engine = Controller::open(g_paths, {.stall_one_in = 2, .shuffle = true}, 4);
    Rig rig(engine, 64, 1, kSlow, 250'000u << trial % 4);
    const u64 round = rig.post(pages(0, 64));
    if (!queue::await_round(rig.q, round)) continue;  // gave up on the service's end too
    broken += rig.service->broken();
    const system_ref<u64> word(*rig.q.answer(round));
    const u64 answer = word.load(std::memory_order_acquire);
    if (rig.service->broken()) rig.service->close();
    CHECK(answer == word.load(std::memory_order_acquire) || rig.service->broken());
    for (const int error : rig.errors(round, 64)) CHECK(error == (rig.service->broken() ? ECANCELED : 0));
  }
  std::printf("%d of 100 rounds broken\n", broken);
}

void a_device_sees_the_same_memory_at_its_own_addresses() {
  const io::QueueMemory memory({.staging_bytes = 1 << 20});
  std::vector<std::byte> local(memory.local_bytes());
  const auto host = reinterpret_cast<uintptr_t>(memory.shared().get());
  const auto own = reinterpret_cast<uintptr_t>(local.data());
  constexpr u64 kShift = u64{1} << 40;
  const queue::Pair q = memory.pair(local.data()), device = memory.pair(host + kShift, own + 2 * kShift);
  const auto at = [](const void* a) { return reinterpret_cast<uintptr_t>(a); };
  CHECK(at(device.entries) == at(q.entries) + kShift && at(device.doorbells) == at(q.doorbells) + kShift);
  CHECK(at(device.answers) == at(q.answers) + kShift && at(device.staging) == at(q.staging) + kShift);
  CHECK(at(device.abandoned) == at(q.abandoned) + kShift && at(device.arrived) == at(q.arrived) + 2 * kShift);
  CHECK(at(q.entries) >= host && at(q.pages(3) + q.round_bytes) <= host + memory.shared_bytes());
  CHECK(at(q.answer(3) + 1) + 4 * q.round_max <= at(q.staging));
  CHECK(at(q.arrived) >= own && at(q.arrived + 1) <= own + memory.local_bytes());
  CHECK_EQUAL(device.round_max, q.round_max);
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

void what_does_not_fit_is_refused() {
  const auto engine = Controller::open(g_paths, {});
  const io::QueueMemory memory({.staging_bytes = 1 << 20, .slot_bytes = 512});
  std::vector<std::byte> local(memory.local_bytes());
  const queue::Pair pair = memory.pair(local.data());
  const auto serve = [&](std::vector<io::QueueTable> tables) {
    io::QueueService(engine, std::move(tables), pair, memory.shared());
  };
  throws<std::invalid_argument>("table 0 has pages of 4096 B; the staging slots hold 512 B",
                                [&] { serve(kTables); });
  throws<std::invalid_argument>("table 0 has no files", [&] { serve({{1, 0, 0, 512}}); });
  throws<std::invalid_argument>("more bytes than any file", [&] { serve({{u64{1} << 48, 0, 1, 1u << 31}}); });
  throws<std::invalid_argument>("has files 1 to 3; the engine has 3", [&] { serve({{8, 1, 3, 512}}); });
  io::Options options;
  options.max_read_bytes = 512;
  options.direct = false;
  const io::QueueMemory long_pages({.staging_bytes = 1 << 20});
  throws<std::invalid_argument>("table 0 has pages of 4096 B; the engine was opened for reads of 512 B", [&] {
    io::QueueService(io::open_engine("threads", g_paths, options), kTables, long_pages.pair(local.data()),
                     long_pages.shared());
  });
  const auto make = [](io::QueueOptions options) { io::QueueMemory{options}; };
  throws<std::invalid_argument>("(got 24)", [&] { make({.slot_bytes = 24}); });
  throws<std::invalid_argument>("staging_bytes is 16380; 4 rounds of at least a page of 4096 B need 16384",
                                [&] { make({.staging_bytes = 16380}); });
  throws<std::invalid_argument>("rounds_max must be 1 to 64 (got 65)", [&] { make({.rounds_max = 65}); });
  CHECK_EQUAL(io::QueueMemory({}).round_max(), 16384u);
}

void a_forked_child_is_refused_and_ends() {
  auto rig = std::make_unique<Rig>(open_real("threads"), 8);
  const pid_t child = fork();
  if (child == 0) {
    throws<std::runtime_error>("before a fork", [&] { rig->service->arm(); });
    rig.reset();
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  for (const int error : rig->run(pages(0, 8))) CHECK_EQUAL(error, 0);
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
  a_lost_completion_does_not_keep_the_other_rounds();
  a_wait_that_nobody_ends_gives_up();
  closing_releases_the_waiters_of_requests_in_flight();
  closing_waits_for_issued_reads();
  a_closed_engine_cancels_the_requests();
  a_page_whose_checksum_is_wrong_is_an_error_of_its_own();
  a_doorbell_without_its_entries_is_an_error();
  rounds_without_such_a_table_fail_and_empty_ones_do_not();
  a_queue_that_somebody_gave_up_releases_everybody_else();
  what_became_of_a_broken_round_does_not_change_any_more();
  a_device_sees_the_same_memory_at_its_own_addresses();
  the_thread_sleeps_while_nothing_is_armed();
  what_does_not_fit_is_refused();
  a_forked_child_is_refused_and_ends();
}
