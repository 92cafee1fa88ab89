// sources: io/*.cpp store/crc32c.cpp store/mapped_file.cpp
// The I/O engines under several submitting threads, with injected and real faults, closed and cancelled in
// mid-flight. Argument: a directory to work in.
#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <linux/io_uring.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.h"
#include "io/engine.h"
#include "io/ring.h"

using namespace gids;
using io::Batch;
using io::Engine;
using io::Options;
using io::Read;

namespace {

constexpr u64 kPage = 4096;
std::vector<std::string> g_paths;
std::vector<std::vector<std::byte>> g_contents;  // the model: what each file holds
bool g_direct = true;

void make_files(const std::string& dir) {
  std::mt19937_64 random(7);
  for (const u64 bytes : {64 * kPage, 40 * kPage + 1234, u64{0}}) {
    std::vector<std::byte> content(bytes);
    for (std::byte& b : content) b = static_cast<std::byte>(random());
    g_paths.push_back(dir + "/shard-" + std::to_string(g_paths.size()) + ".bin");
    std::ofstream(g_paths.back(), std::ios::binary)
        .write(reinterpret_cast<const char*>(content.data()), static_cast<std::streamsize>(bytes));
    g_contents.push_back(std::move(content));
  }
}

// Where O_DIRECT or io_uring cannot be had, the tests run on what there is, and say so.
std::vector<std::string> engines() {
  std::vector<std::string> kinds = {"threads", "mmap"};
  if (const std::string why = io::why_no_uring(); why.empty()) {
    kinds.push_back("uring");
  } else {
    std::printf("uring not tested: %s\n", why.c_str());
  }
  return kinds;
}

std::shared_ptr<Engine> open(const std::string& kind, Options options) {
  options.direct = options.direct && g_direct;
  return io::open_engine(kind, g_paths, options);
}

struct PageMemory {
  explicit PageMemory(u64 size) : bytes(align_up(std::max<u64>(size, 1), kPage)) {
    base = static_cast<std::byte*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    CHECK(base != MAP_FAILED);
  }
  ~PageMemory() { munmap(base, bytes); }
  PageMemory(const PageMemory&) = delete;
  std::byte* base;
  u64 bytes;
};

// Records what each read got. Plain memory on purpose: the engine must order done() before finished().
class Recorder final : public Batch {
 public:
  struct Result {
    int calls = 0;
    int error = -1;
    bool equal = false;
  };
  explicit Recorder(std::vector<Read> wanted) : results(wanted.size()) {
    for (u64 i = 0; i < wanted.size(); ++i) wanted[i].cookie = i;
    reads = std::move(wanted);
  }
  void done(const Read& r, const std::byte* data, int error) noexcept override {
    Result& result = results[r.cookie];
    ++result.calls;
    result.error = error;
    result.equal = data && std::memcmp(data, &g_contents[r.file][r.offset], r.bytes) == 0;
    if (r.dest && data && data != r.dest) result.equal = false;
  }
  void check_each_done_once() const {
    for (const Result& r : results) CHECK_EQUAL(r.calls, 1);
  }
  std::vector<Result> results;  // by cookie
};

bool beyond_end(const Read& r) { return r.offset + r.bytes > g_contents[r.file].size(); }

// Pages, unaligned pieces, neighbors, duplicates, reads beyond the end; into memory or bounced.
std::vector<Read> random_reads(std::mt19937_64& random, u64 count, PageMemory& memory) {
  std::vector<Read> reads;
  u64 used = 0;
  while (reads.size() < count) {
    const u32 file = static_cast<u32>(random() % g_paths.size());
    const bool pages = random() % 4 != 0;
    const u32 bytes = static_cast<u32>(pages ? kPage * (1 + random() % 3) : 1 + random() % 9000);
    u64 offset = pages ? random() % 64 * kPage : random() % (64 * kPage);
    for (u64 run = 1 + random() % 6; run && reads.size() < count; --run, offset += random() % 8 ? bytes : 0) {
      std::byte* dest = nullptr;
      if (random() % 4) {
        const u64 at = pages ? align_up(used, kPage) : used;
        CHECK(at + bytes <= memory.bytes);
        dest = memory.base + at;
        used = at + bytes;
      }
      reads.push_back({offset, dest, bytes, file, 0});
    }
  }
  return reads;
}

void wait(Batch& batch) {
  for (int i = 0; i < 600; ++i)
    if (batch.wait_for(100)) return;
  CHECK(!"a batch hangs");
}

void check(const Recorder& batch, const std::vector<u64>& bad_offsets_of_file_0) {
  batch.check_each_done_once();
  for (const Read& r : batch.reads) {
    bool bad = false;
    for (const u64 at : bad_offsets_of_file_0) bad |= r.file == 0 && r.offset <= at && at < r.offset + r.bytes;
    const auto& result = batch.results[r.cookie];
    if (beyond_end(r)) {
      CHECK_EQUAL(result.error, ENODATA);
    } else if (bad) {
      CHECK_EQUAL(result.error, EIO);
    } else {
      CHECK_EQUAL(result.error, 0);
      CHECK(result.equal);
    }
  }
}

void test_batches_of_several_threads_get_the_bytes_of_the_files(const std::string& kind) {
  const std::vector<u64> bad = {5 * kPage + 17, 33 * kPage};
  for (const u32 depth : {1u, 4u, 64u}) {
    for (const u32 merge : {0u, 1u << 17}) {
      const u32 threads = depth == 4 ? 3 : 0;
      auto engine = open(kind, {depth, threads, 3 * kPage, merge, true});
      engine->inject_faults({{0, bad[0], EIO, ~0u}, {0, bad[1], EIO, ~0u}});
      constexpr int kSubmitters = 3;
      std::barrier go(kSubmitters);
      std::vector<std::thread> submitters;
      std::array<u64, kSubmitters> counts{};
      for (int s = 0; s < kSubmitters; ++s) {
        submitters.emplace_back([&, s] {
          std::mt19937_64 random(u64{depth} * 1000 + merge + static_cast<u64>(s));
          std::vector<std::unique_ptr<PageMemory>> memories;
          std::vector<std::shared_ptr<Recorder>> batches;
          go.arrive_and_wait();
          for (int b = 0; b < 4; ++b) {
            memories.push_back(std::make_unique<PageMemory>(1 << 21));
            batches.push_back(std::make_shared<Recorder>(random_reads(random, random() % 120, *memories.back())));
            counts[static_cast<size_t>(s)] += batches.back()->reads.size();
            engine->submit(batches.back());
          }
          for (auto& batch : batches) {
            wait(*batch);
            check(*batch, bad);
          }
        });
      }
      for (std::thread& t : submitters) t.join();
      const io::Stats stats = engine->stats();
      CHECK_EQUAL(stats.reads, counts[0] + counts[1] + counts[2]);
      CHECK(stats.depth_max <= engine->depth());
      CHECK(stats.errors > 0);
      CHECK(stats.busy_ns > 0 && stats.latency_ns > 0);
    }
  }
}

// Reads of files in the page cache keep a ring busy, so that others come and go.
void test_rings_follow_the_load() {
  io::Options options;
  options.depth = 256 + 3 * 64;
  options.most_rings = 4;
  options.max_read_bytes = 3 * kPage;
  options.direct = false;
  std::mt19937_64 random(9);
  PageMemory memory(1 << 26);
  for (int round = 0; round < 3; ++round) {
    auto engine = io::open_engine("uring", g_paths, options);
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(150);
    while (std::chrono::steady_clock::now() < until) {
      auto batch = std::make_shared<Recorder>(random_reads(random, 2000, memory));
      engine->submit(batch);
      wait(*batch);
      check(*batch, {});
    }
    const io::Stats stats = engine->stats();
    CHECK(stats.threads >= 1 && stats.threads <= 4);
    CHECK(stats.depth_max <= engine->depth());
    if (round) engine->submit(std::make_shared<Recorder>(random_reads(random, 2000, memory)));
    engine->close();
  }
}

void test_close_completes_what_was_submitted(const std::string& kind) {
  auto engine = open(kind, {8, 0, 3 * kPage, 1u << 17, true});
  std::mt19937_64 random(3);
  std::vector<std::unique_ptr<PageMemory>> memories;
  std::vector<std::shared_ptr<Recorder>> batches;
  for (int b = 0; b < 6; ++b) {
    memories.push_back(std::make_unique<PageMemory>(1 << 22));
    batches.push_back(std::make_shared<Recorder>(random_reads(random, 200, *memories.back())));
    engine->submit(batches.back());
  }
  std::thread second([&] { engine->close(); });
  engine->close();
  second.join();
  for (auto& batch : batches) {
    CHECK(batch->finished());
    check(*batch, {});
  }
  bool refused = false;
  try {
    engine->submit(batches[0]);
  } catch (const std::runtime_error&) {
    refused = true;
  }
  CHECK(refused);
}

void test_a_submission_that_races_with_close_is_read_or_refused(const std::string& kind) {
  for (u64 round = 0; round < 5; ++round) {
    auto engine = open(kind, {4, 0, kPage, 0, true});
    std::barrier go(3);
    std::vector<std::thread> submitters;
    for (u64 s = 0; s < 2; ++s) {
      submitters.emplace_back([&, s] {
        std::vector<std::shared_ptr<Recorder>> accepted;
        go.arrive_and_wait();
        try {
          for (u64 i = 0; i < 5000; ++i) {
            const u64 page = (i + s) % 64;
            accepted.push_back(std::make_shared<Recorder>(
                std::vector<Read>{{page * kPage, nullptr, kPage, 0, 0}}));
            engine->submit(accepted.back());
          }
        } catch (const std::runtime_error&) {
          accepted.pop_back();
        }
        for (auto& batch : accepted) {
          wait(*batch);
          check(*batch, {});
        }
      });
    }
    go.arrive_and_wait();
    std::this_thread::sleep_for(std::chrono::milliseconds(round));
    engine->close();
    for (std::thread& t : submitters) t.join();
  }
}

// A batch that holds the engine's thread inside done() until it is let go.
class Held final : public Batch {
 public:
  Held() { reads = {{0, nullptr, kPage, 0, 0}}; }
  void done(const Read&, const std::byte*, int) noexcept override {
    while (!open.load()) std::this_thread::yield();
  }
  std::atomic<bool> open{false};
};

void test_cancel_completes_unissued_reads_with_ecanceled(const std::string& kind) {
  auto engine = open(kind, {1, 1, kPage, 0, true});
  auto held = std::make_shared<Held>();
  engine->submit(held);
  while (engine->stats().depth_max == 0) std::this_thread::yield();
  std::vector<Read> reads;
  for (u64 i = 0; i < 300; ++i) reads.push_back({i % 64 * kPage, nullptr, kPage, 0, 0});
  auto batch = std::make_shared<Recorder>(reads);
  engine->submit(batch);
  engine->cancel(*batch);
  CHECK(batch->finished());
  batch->check_each_done_once();
  for (const auto& r : batch->results) CHECK_EQUAL(r.error, ECANCELED);
  held->open = true;
  wait(*held);
  CHECK_EQUAL(engine->stats().errors, 0u);  // nothing was read
  engine->cancel(*batch);  // a finished batch: nothing
  batch->results.assign(batch->results.size(), {});
  engine->submit(batch);  // a finished batch may be submitted again, and cancelled in flight
  engine->cancel(*batch);
  wait(*batch);
  batch->check_each_done_once();
  for (const auto& r : batch->results) CHECK(r.error == ECANCELED || (r.error == 0 && r.equal));
}

void test_wait_for_returns_false_while_a_read_is_not_done(const std::string& kind) {
  auto engine = open(kind, {4, 0, kPage, 0, true});
  auto batch = std::make_shared<Held>();
  CHECK(batch->finished());
  engine->submit(batch);
  CHECK(!batch->finished());
  CHECK(!batch->wait_for(5));
  bool refused = false;
  try {
    engine->submit(batch);
  } catch (const std::logic_error&) {
    refused = true;
  }
  CHECK(refused);
  batch->open = true;
  wait(*batch);
}

void test_eintr_and_eagain_are_repeated_within_a_bound(const std::string& kind) {
  auto engine = open(kind, {4, 0, kPage, 0, true});
  PageMemory memory(kPage);
  auto read_once = [&](u32 times) {
    engine->inject_faults({{0, 0, EAGAIN, times}});
    auto batch = std::make_shared<Recorder>(std::vector<Read>{{0, memory.base, kPage, 0, 0}});
    engine->submit(batch);
    wait(*batch);
    return batch->results[0];
  };
  const auto few = read_once(16);
  CHECK_EQUAL(few.error, 0);
  CHECK(few.equal);
  CHECK_EQUAL(engine->stats().retries, 16u);
  CHECK_EQUAL(read_once(~0u).error, EAGAIN);
}

void test_registered_memory_is_read_into_inside_across_and_beside(const std::string& kind) {
  auto engine = open(kind, {4, 0, 2 * kPage, 1u << 17, true});
  PageMemory memory(16 * kPage);
  const auto owner = std::make_shared<int>();
  engine->register_memory(memory.base + 4 * kPage, 8 * kPage, owner);
  for (int round = 0; round < 3; ++round) {
    std::vector<Read> reads;
    for (const u64 page : {0, 3, 4, 7, 10, 11, 14})  // two pages each: 3 and 11 straddle an edge
      reads.push_back({page * 3 * kPage, memory.base + page * kPage, static_cast<u32>(kPage), 0, 0});
    reads.push_back({60 * kPage, memory.base + 11 * kPage, 2 * kPage, 0, 0});
    reads.push_back({50 * kPage, memory.base + 2 * kPage, 2 * kPage, 0, 0});
    for (Read& r : reads) {  // one at a time: some share their destination
      auto batch = std::make_shared<Recorder>(std::vector<Read>{r});
      engine->submit(batch);
      wait(*batch);
      check(*batch, {});
    }
  }
}

void test_registered_memory_is_kept_until_close_and_not_after(const std::string& kind) {
  auto engine = open(kind, {4, 0, kPage, 1u << 17, true});
  PageMemory memory(2 * kPage);
  auto read = [&](u64 page) {
    auto batch = std::make_shared<Recorder>(std::vector<Read>{{page * kPage, memory.base + page * kPage, kPage, 0, 0}});
    engine->submit(batch);
    wait(*batch);
    check(*batch, {});
  };
  auto owner = std::make_shared<int>();
  const std::weak_ptr<int> watch = owner;
  engine->register_memory(memory.base, kPage, owner);
  read(0);  // an engine that registers memory has done it now
  owner.reset();
  CHECK_EQUAL(!watch.expired(), kind == "uring" && engine->note().find("memory not registered") == std::string::npos);
  read(0);
  engine->close();
  CHECK(watch.expired());
  owner = std::make_shared<int>();
  engine->register_memory(memory.base + kPage, kPage, owner);
  CHECK_EQUAL(owner.use_count(), 1);
}

void test_forgotten_memory_is_given_up_and_its_place_used_again(const std::string& kind) {
  auto engine = open(kind, {4, 0, kPage, 1u << 17, true});
  PageMemory memory(2 * kPage);
  for (u64 round = 0; round < 3000; ++round) {  // more than an engine has places
    auto owner = std::make_shared<int>();
    const std::weak_ptr<int> watch = owner;
    engine->register_memory(memory.base + round % 2 * kPage, kPage, owner);
    auto batch = std::make_shared<Recorder>(
        std::vector<Read>{{round % 7 * kPage, memory.base + round % 2 * kPage, kPage, 0, 0}});
    engine->submit(batch);
    wait(*batch);
    check(*batch, {});
    owner.reset();
    engine->forget_memory(memory.base + round % 2 * kPage, kPage);
    while (!watch.expired()) std::this_thread::yield();  // also by idle threads
  }
  CHECK(engine->note().find("memory not registered (I") == std::string::npos);  // Invalid argument
}

void test_an_interrupted_wait_cancels_and_waits_for_what_is_in_flight(const std::string& kind) {
  auto engine = open(kind, {1, 1, kPage, 0, true});
  auto held = std::make_shared<Held>();
  engine->submit(held);
  while (engine->stats().depth_max == 0) std::this_thread::yield();
  auto batch = std::make_shared<Recorder>(std::vector<Read>(20, {0, nullptr, kPage, 0, 0}));
  engine->submit(batch);
  struct Interrupt {};
  auto interrupt = [] { throw Interrupt(); };
  bool interrupted = false;
  try {
    engine->wait(*batch, interrupt);
  } catch (const Interrupt&) {
    interrupted = true;
  }
  CHECK(interrupted && batch->finished());
  batch->check_each_done_once();
  for (const auto& r : batch->results) CHECK_EQUAL(r.error, ECANCELED);

  interrupted = false;
  try {
    engine->wait(*held, [&] {
      held->open = true;
      throw Interrupt();
    });
  } catch (const Interrupt&) {
    interrupted = true;
  }
  CHECK(interrupted && held->finished());
  engine->wait(*held, interrupt);  // nothing to wait for
}

// A thread has 16 places for rings that it registers.
void test_a_ring_gives_its_place_in_the_thread_back() {
  for (int i = 0; i < 20; ++i) io::Ring{1};
  io_uring_params params{};
  const int ring = static_cast<int>(syscall(__NR_io_uring_setup, 1, &params));
  CHECK(ring >= 0);
  struct Place {
    u32 offset, reserved;
    u64 data;
  };
  std::vector<Place> places(16, {~0u, 0, static_cast<u64>(ring)});
  constexpr int register_ring_fds = 20;
  const long taken = syscall(__NR_io_uring_register, ring, register_ring_fds, places.data(), 16);
  CHECK(taken == 16 || (taken < 0 && errno == EINVAL));  // kernels before 5.18 have no places
  ::close(ring);
}

void test_a_failed_merge_fails_only_the_reads_that_the_fault_touches(const std::string& kind) {
  if (kind == "mmap") return;  // /proc/self/mem cannot be mapped
  // A file that really answers EIO: our own memory, where a page maps what lies behind the end of a file.
  PageMemory memory(8 * kPage), out(8 * kPage);
  std::memset(memory.base, 42, 8 * kPage);
  const int empty = ::open(g_paths[2].c_str(), O_RDONLY | O_CLOEXEC);
  std::byte* hole = memory.base + 3 * kPage;
  CHECK(mmap(hole, kPage, PROT_READ, MAP_PRIVATE | MAP_FIXED, empty, 0) == hole);
  ::close(empty);
  auto engine = io::open_engine(kind, {"/proc/self/mem"}, {4, 0, kPage, 1u << 17, false});

  class Errors final : public Batch {
   public:
    void done(const Read& r, const std::byte* data, int error) noexcept override {
      errors[r.cookie] = error;
      good[r.cookie] = data && data[0] == std::byte{42} && data[kPage - 1] == std::byte{42};
    }
    std::array<int, 8> errors{};
    std::array<bool, 8> good{};
  };
  auto batch = std::make_shared<Errors>();
  for (u64 i = 0; i < 8; ++i)
    batch->reads.push_back({reinterpret_cast<u64>(memory.base) + i * kPage, out.base + i * kPage, kPage, 0, i});
  engine->submit(batch);
  wait(*batch);
  for (u64 i = 0; i < 8; ++i) {
    CHECK_EQUAL(batch->errors[i], i == 3 ? EIO : 0);
    CHECK_EQUAL(batch->good[i], i != 3);
  }
}

void test_a_new_batch_does_not_wait_for_a_slow_read_of_the_one_before(const std::string& kind) {
  if (kind == "mmap") return;  // a page fault in a thread of its own
  // Slow: the read's destination is a page that the kernel may not touch until we provide it.
  const int uffd = static_cast<int>(syscall(__NR_userfaultfd, O_CLOEXEC));
  if (uffd < 0) {
    std::printf("slow reads not tested: userfaultfd: %s\n", std::strerror(errno));
    return;
  }
  PageMemory source(kPage), slow(kPage), quick(kPage);
  std::memset(source.base, 42, kPage);
  uffdio_api api{UFFD_API, 0, 0};
  CHECK(ioctl(uffd, UFFDIO_API, &api) == 0);
  uffdio_register registration{{reinterpret_cast<u64>(slow.base), kPage}, UFFDIO_REGISTER_MODE_MISSING, 0};
  CHECK(ioctl(uffd, UFFDIO_REGISTER, &registration) == 0);

  class Errors final : public Batch {
   public:
    void done(const Read&, const std::byte*, int e) noexcept override { error = e; }
    int error = -1;
  };
  auto engine = io::open_engine(kind, {"/proc/self/mem"}, {4, 0, kPage, 0, false});
  auto submit = [&](std::byte* dest) {
    auto batch = std::make_shared<Errors>();
    batch->reads = {{reinterpret_cast<u64>(source.base), dest, kPage, 0, 0}};
    engine->submit(batch);
    return batch;
  };
  auto first = submit(slow.base);
  CHECK(!first->wait_for(50));
  auto second = submit(quick.base);
  wait(*second);
  CHECK_EQUAL(second->error, 0);
  CHECK(!first->finished());
  uffdio_zeropage zero{{reinterpret_cast<u64>(slow.base), kPage}, 0, 0};
  CHECK(ioctl(uffd, UFFDIO_ZEROPAGE, &zero) == 0);
  wait(*first);
  CHECK_EQUAL(first->error, 0);
  CHECK(slow.base[17] == std::byte{42});
  ::close(uffd);
}

void test_neighbors_become_one_request(const std::string& kind) {
  auto engine = open(kind, {4, 0, kPage, 8 * kPage, true});
  PageMemory memory(64 * kPage);
  std::vector<Read> reads;
  for (u64 i = 64; i-- > 0;) reads.push_back({i * kPage, memory.base + (i * 29 % 64) * kPage, kPage, 0, 0});
  auto batch = std::make_shared<Recorder>(reads);
  engine->submit(batch);
  wait(*batch);
  check(*batch, {});
  CHECK_EQUAL(engine->stats().requests, 8u);
  CHECK_EQUAL(engine->stats().bytes_read, 64 * kPage);
}

// Counts the reads that are done, and those that got the bytes of the file.
class Count final : public Batch {
 public:
  void done(const Read& r, const std::byte* data, int) noexcept override {
    if (data && std::memcmp(data, &g_contents[r.file][r.offset], r.bytes) == 0) equal.fetch_add(1);
    all.fetch_add(1);
  }
  std::atomic<u64> equal{0}, all{0};
};

void test_a_large_batch_is_read_while_it_is_sorted(const std::string& kind) {
  constexpr u64 kReads = 100'000;
  // Buffered: so many direct reads would wait for the disk, and nothing else, for most of a minute.
  const auto engine = open(kind, {.depth = 16, .threads = kind == "uring" ? 1u : 2u, .direct = false});
  const auto batch = std::make_shared<Count>();
  std::mt19937_64 random(3);
  for (u64 i = 0; i < kReads; ++i) {
    const u32 file = random() % 8 == 0;  // both files have reads in every part
    batch->reads.push_back({random() % 40 * kPage, nullptr, 512, file, i});
  }
  u64 turns = 0, early = 0;  // reads that are done when submit() returns: on a busy machine perhaps none
  while (early == 0 && turns < 10) {
    const u64 before = batch->all.load();
    engine->submit(batch);
    early = batch->all.load() - before;
    wait(*batch);
    ++turns;
  }
  CHECK(early > 0);
  CHECK_EQUAL(batch->all.load(), turns * kReads);
  CHECK_EQUAL(batch->equal.load(), turns * kReads);
  batch->reads.resize(10'000);
  std::shuffle(batch->reads.begin(), batch->reads.end(), random);
  engine->submit(batch);  // and again, with a close amid it
  engine->close();
  CHECK_EQUAL(batch->all.load(), turns * kReads + 10'000);
}

void test_bad_submissions_are_refused_and_read_nothing(const std::string& kind) {
  auto engine = open(kind, {4, 0, kPage, 0, true});
  for (const Read& bad : {Read{0, nullptr, kPage, 3, 0}, Read{0, nullptr, 0, 0, 0}, Read{0, nullptr, kPage + 1, 0, 0},
                          Read{~0ull, nullptr, kPage, 0, 0}}) {
    auto batch = std::make_shared<Recorder>(std::vector<Read>{{0, nullptr, kPage, 0, 0}, bad});
    bool refused = false;
    try {
      engine->submit(batch);
    } catch (const std::invalid_argument&) {
      refused = true;
    }
    CHECK(refused);
    CHECK(batch->finished());
    CHECK_EQUAL(batch->results[0].calls, 0);
  }
  auto none = std::make_shared<Recorder>(std::vector<Read>{});
  engine->submit(none);
  CHECK(none->finished() && none->wait_for(0));
}

}  // namespace

int main(int argc, char** argv) {
  CHECK_EQUAL(argc, 2);
  make_files(argv[1]);
  try {
    io::open_engine("threads", g_paths, {});
  } catch (const std::system_error& e) {
    std::printf("buffered: %s\n", e.what());
    g_direct = false;
  }
  for (const std::string& kind : engines()) {
    test_batches_of_several_threads_get_the_bytes_of_the_files(kind);
    test_close_completes_what_was_submitted(kind);
    test_a_submission_that_races_with_close_is_read_or_refused(kind);
    test_cancel_completes_unissued_reads_with_ecanceled(kind);
    test_wait_for_returns_false_while_a_read_is_not_done(kind);
    test_eintr_and_eagain_are_repeated_within_a_bound(kind);
    test_registered_memory_is_read_into_inside_across_and_beside(kind);
    test_registered_memory_is_kept_until_close_and_not_after(kind);
    test_forgotten_memory_is_given_up_and_its_place_used_again(kind);
    test_an_interrupted_wait_cancels_and_waits_for_what_is_in_flight(kind);
    if (kind == "uring") test_rings_follow_the_load();
    if (kind == "uring") std::thread(test_a_ring_gives_its_place_in_the_thread_back).join();
    test_a_failed_merge_fails_only_the_reads_that_the_fault_touches(kind);
    test_a_new_batch_does_not_wait_for_a_slow_read_of_the_one_before(kind);
    test_neighbors_become_one_request(kind);
    test_a_large_batch_is_read_while_it_is_sorted(kind);
    test_bad_submissions_are_refused_and_read_nothing(kind);
    std::printf("%s: ok\n", kind.c_str());
  }
}
