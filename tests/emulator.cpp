// Runs the threads of an emulated kernel: fibers, warps, blocks, and what goes wrong among them. Called by
// tests/emulator.py; tests/emulator.h is what a kernel sees of it.
#include <dlfcn.h>
#include <link.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "emulator_fiber.h"
#include "emulator_memory.h"

__thread uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {
namespace {

constexpr u32 kBlocksAtOnce = 2;   // threads of the operating system
constexpr u32 kUnluckyAtomic = 8;  // one atomic in so many yields
constexpr u32 kCandidates = 4;     // of which the favoured one goes on

// --- random numbers: splitmix64 ---

struct Random {
  u64 state;

  u64 next() {
    u64 z = state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  u32 below(u32 end) { return static_cast<u32>((next() >> 32) * end >> 32); }
};

// --- one launch ---

struct Launch {
  const Kernel& kernel;
  void** arguments;
  u32 blocks, threads;
  u32 waiting_blocks_max;  // of a kernel whose threads sleep
  u64 seed;
  std::chrono::steady_clock::time_point end;
  std::vector<u32> order;  // of the blocks
  std::size_t shared_module = 0;  // what holds the kernel's shared memory, if it has any
  std::size_t shared_bytes = 0;

  std::atomic<u32> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::string error;  // the first

  void fail(const std::string& text) {
    std::lock_guard lock(mutex);
    if (!failed.exchange(true)) error = text;
  }
};

enum class State : unsigned char { ready, in_warp, in_block, returned };

struct Fiber {
  Context context;
  State state;
  Meeting meeting;
  u32 mask;
  u32 source;
  u64 value;  // what it brings to a meeting, then what it takes from it
  Site site;
};

const char* name_of(Meeting meeting) {
  switch (meeting) {
    case Meeting::sync: return "__syncwarp";
    case Meeting::shuffle: return "a shuffle";
    case Meeting::ballot: return "__ballot_sync";
    case Meeting::any: return "__any_sync";
    case Meeting::all: return "__all_sync";
    case Meeting::match: return "__match_any_sync";
    default: return "__syncthreads";
  }
}

std::string text_of(const std::string& file, u32 line) {
  return file.substr(file.rfind('/') + 1) + ":" + std::to_string(line);
}
std::string text_of(const Site& site) { return text_of(site.file_name(), site.line()); }

bool same_site(const Site& a, const Site& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         (a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0);
}

std::string hex(u32 mask) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", mask);
  return text;
}

void enter_fiber();

// The blocks that one thread of the operating system runs, one after another.
class Worker {
 public:
  explicit Worker(Launch& launch) : launch_(launch), stacks_(take_stacks()), fibers_(launch.threads) {}
  ~Worker() { give_stacks(stacks_); }

  void run() {
    for (;;) {
      const u32 i = launch_.next.fetch_add(1);
      if (i >= launch_.blocks || launch_.failed) return;
      run_block(launch_.order[i]);
    }
  }

  bool in_fiber() const { return in_fiber_; }

  void call_kernel() {
    launch_.kernel.call(launch_.arguments);
    Fiber& me = fibers_[threadIdx.x];
    me.state = State::returned;
    --alive_;
    const u32 first = threadIdx.x / 32 * 32;
    for (u32 lane = first; lane < first + 32; ++lane)
      if (fibers_[lane].state == State::in_warp) try_warp(lane);
    try_block();
    leave();
  }

  u64 meet_in_warp(Meeting meeting, u32 mask, u64 value, u32 source, const Site& site) {
    Fiber& me = fibers_[threadIdx.x];
    if (!(mask >> (threadIdx.x % 32) & 1))
      fail(std::string("calls ") + name_of(meeting) + " with the mask " + hex(mask) + ", which lacks its own lane",
           text_of(site));
    me.state = State::in_warp;
    me.meeting = meeting, me.mask = mask, me.value = value, me.source = source, me.site = site;
    try_warp(threadIdx.x);
    leave();
    return me.value;
  }

  int meet_in_block(Meeting meeting, bool value, const Site& site) {
    Fiber& me = fibers_[threadIdx.x];
    me.state = State::in_block;
    me.meeting = meeting, me.value = value, me.site = site;
    if (in_block_ == 0) {
      block_site_ = site;
    } else if (!same_site(site, block_site_)) {
      fail("is at a barrier, but other threads of the block are at the barrier of " + text_of(block_site_),
           text_of(site));
    }
    ++in_block_;
    block_count_ += value;
    try_block();
    leave();
    return static_cast<int>(me.value);
  }

  void yield(bool asleep) {
    if (asleep) {
      if (launch_.blocks > launch_.waiting_blocks_max)
        fail("waits in a launch of " + std::to_string(launch_.blocks) + " blocks; at most " +
                 std::to_string(launch_.waiting_blocks_max) + " blocks of a kernel that waits run at once",
             "");
      favour_[threadIdx.x / 32] = random_.below(1u << 16);
      sched_yield();
    }
    if (++yields_ % 256 == 0 && std::chrono::steady_clock::now() > launch_.end)
      fail("runs for longer than the emulator's time limit", "");
    make_ready(threadIdx.x);
    leave();
  }

  void before_atomic() {
    if (random_.below(kUnluckyAtomic) == 0) yield(false);
  }

  [[noreturn]] void fail(const std::string& what, const std::string& where) {
    launch_.fail(who(threadIdx.x) + " " + what + (where.empty() ? "" : " (" + where + ")"));
    leave();
    __builtin_unreachable();  // a failed block is not taken up again
  }

 private:
  std::string who(u32 thread) const {
    return std::string("kernel ") + launch_.kernel.name + ", block " + std::to_string(blockIdx.x) + ": thread " +
           std::to_string(thread);
  }

  void run_block(u32 block) {
    random_.state = launch_.seed + 0x632be59bd9b4e019 * (block + 1);
    random_.next();
    if (launch_.shared_bytes) poison_shared();
    blockIdx = {block, 0, 0}, blockDim = {launch_.threads, 1, 1}, gridDim = {launch_.blocks, 1, 1};
    alive_ = launch_.threads, in_block_ = 0, block_count_ = 0;
    favours_ = random_.below(2);
    for (u32& favour : favour_) favour = random_.below(1u << 16);
    ready_.clear();
    for (u32 i = 0; i < launch_.threads; ++i) {
      fibers_[i].context.prepare(stacks_.stack(i), enter_fiber);
      make_ready(i);
    }
    while (alive_ && !launch_.failed) {
      if (ready_.empty()) return launch_.fail(stuck());
      const u32 i = take_ready();
      threadIdx = {i, 0, 0};
      in_fiber_ = true;
      Context::change(main_, fibers_[i].context);
      in_fiber_ = false;
    }
  }

  // In half of the blocks any thread is as likely as another; in the others rather one of a favoured warp, so that
  // some run far ahead of the rest. A warp that sleeps draws its favour anew.
  u32 take_ready() {
    u32 best = random_.below(static_cast<u32>(ready_.size()));
    for (u32 k = 1; favours_ && k < kCandidates; ++k) {
      const u32 other = random_.below(static_cast<u32>(ready_.size()));
      if (favour_[ready_[other] / 32] > favour_[ready_[best] / 32]) best = other;
    }
    std::swap(ready_[best], ready_.back());
    const u32 i = ready_.back();
    ready_.pop_back();
    return i;
  }

  void leave() { Context::change(fibers_[threadIdx.x].context, main_); }

  void make_ready(u32 i) {
    fibers_[i].state = State::ready;
    ready_.push_back(i);
  }

  void poison_shared() const {
    std::size_t index[2] = {launch_.shared_module, 0};  // of the ABI: tls_index
    using Get = void* (*)(void*);
    static const Get get = reinterpret_cast<Get>(dlsym(RTLD_DEFAULT, "__tls_get_addr"));
    if (get) std::memset(get(index), kPoison, launch_.shared_bytes);
  }

  // Lets the meeting that thread i waits for happen if all have come.
  void try_warp(u32 i) {
    const Fiber& one = fibers_[i];
    const u32 first = i / 32 * 32;
    u32 lanes[32], count = 0, present = 0;
    for (u32 lane = 0; lane < 32; ++lane) {
      const Fiber& other = fibers_[first + lane];
      if (!(one.mask >> lane & 1) || other.state == State::returned) continue;
      if (other.state != State::in_warp || other.meeting != one.meeting || other.mask != one.mask ||
          !same_site(other.site, one.site))
        return;
      lanes[count++] = lane;
      present |= 1u << lane;
    }
    u64 results[32];
    u32 yes = 0;
    for (u32 k = 0; k < count; ++k) yes |= (fibers_[first + lanes[k]].value ? 1u : 0u) << lanes[k];
    for (u32 k = 0; k < count; ++k) {
      const Fiber& me = fibers_[first + lanes[k]];
      switch (me.meeting) {
        case Meeting::shuffle:
          results[k] = present >> (me.source % 32) & 1 ? fibers_[first + me.source % 32].value
                                                       : kPoison * 0x0101010101010101u;
          break;
        case Meeting::ballot: results[k] = yes; break;
        case Meeting::any: results[k] = yes != 0; break;
        case Meeting::all: results[k] = yes == present; break;
        case Meeting::match:
          results[k] = 0;
          for (u32 o = 0; o < count; ++o)
            if (fibers_[first + lanes[o]].value == me.value) results[k] |= 1u << lanes[o];
          break;
        default: results[k] = 0;
      }
    }
    for (u32 k = 0; k < count; ++k) {
      fibers_[first + lanes[k]].value = results[k];
      make_ready(first + lanes[k]);
    }
  }

  void try_block() {
    if (in_block_ == 0 || in_block_ != alive_) return;
    for (u32 i = 0; i < launch_.threads; ++i) {
      Fiber& one = fibers_[i];
      if (one.state != State::in_block) continue;
      one.value = one.meeting == Meeting::both     ? block_count_ == in_block_
                  : one.meeting == Meeting::either ? block_count_ != 0
                                                   : block_count_;
      make_ready(i);
    }
    in_block_ = 0, block_count_ = 0;
  }

  std::string stuck() const {
    std::string text = std::string("kernel ") + launch_.kernel.name + ", block " + std::to_string(blockIdx.x) +
                       ": no thread can go on:";
    std::vector<bool> told(launch_.threads);
    for (u32 i = 0; i < launch_.threads; ++i) {
      const Fiber& one = fibers_[i];
      if (told[i] || one.state == State::returned) continue;
      u32 count = 0;
      for (u32 j = i; j < launch_.threads; ++j) {
        const Fiber& other = fibers_[j];
        if (other.state != one.state || !same_site(one.site, other.site)) continue;
        if (one.state == State::in_warp && (other.mask != one.mask || j / 32 != i / 32)) continue;
        told[j] = true;
        ++count;
      }
      text += "\n  " + std::to_string(count) + " from thread " + std::to_string(i) + " wait at " + text_of(one.site) +
              " in " + name_of(one.meeting);
      if (one.state == State::in_warp) text += " with the mask " + hex(one.mask);
    }
    const u32 returned = launch_.threads - alive_;
    if (returned) text += "\n  " + std::to_string(returned) + " have returned";
    return text;
  }

  Launch& launch_;
  Stacks stacks_;
  std::vector<Fiber> fibers_;
  std::vector<u32> ready_;
  Context main_;
  Random random_{0};
  bool favours_ = false;
  u32 favour_[kThreadsMax / 32] = {};
  u32 alive_ = 0, in_block_ = 0, block_count_ = 0;
  u64 yields_ = 0;
  bool in_fiber_ = false;
  Site block_site_;
};

__thread Worker* t_worker;

void enter_fiber() { t_worker->call_kernel(); }

// The module whose thread-local memory is the shared memory of the kernel's blocks.
int find_module(dl_phdr_info* info, std::size_t, void* to) {
  Launch& launch = *static_cast<Launch*>(to);
  const auto kernel = reinterpret_cast<std::uintptr_t>(launch.kernel.call);
  bool holds = false;
  std::size_t bytes = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    if (segment.p_type == PT_LOAD) holds |= kernel - info->dlpi_addr - segment.p_vaddr < segment.p_memsz;
    if (segment.p_type == PT_TLS) bytes = segment.p_memsz;
  }
  if (!holds) return 0;
  launch.shared_module = info->dlpi_tls_modid;
  launch.shared_bytes = info->dlpi_tls_modid ? bytes : 0;
  return 1;
}

// --- faults ---

constexpr int kTime = SIGVTALRM;
constexpr int kSignals[] = {SIGSEGV, SIGBUS, kTime};
std::mutex g_signal_mutex;
u32 g_launches = 0;  // that run now
struct sigaction g_before[std::size(kSignals)];

// Where a thread touches what it must not, or never lets others run, its launch fails and the process goes on.
// Nothing of this handler is left when the fiber is: it is never taken up again.
void on_signal(int signal, siginfo_t* info, void*) {
  if (t_worker && t_worker->in_fiber()) {
    if (signal == kTime) t_worker->fail("runs for longer than the emulator's time limit, and never waits", "");
    const bool odd = signal == SIGSEGV && info->si_code == SI_KERNEL;
    t_worker->fail("accesses " + (odd ? "an address that is not aligned" : describe_address(info->si_addr)), "");
  }
  if (signal != kTime) sigaction(signal, &g_before[signal == SIGBUS], nullptr);  // not ours: it comes again
}

class SignalsCaught {
 public:
  SignalsCaught() {
    std::lock_guard lock(g_signal_mutex);
    if (g_launches++) return;
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    for (std::size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &action, &g_before[i]);
  }
  ~SignalsCaught() {
    std::lock_guard lock(g_signal_mutex);
    if (--g_launches) return;
    for (std::size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &g_before[i], nullptr);
  }
};

// Signals the thread that makes it, some time after yields should have seen the end.
class Alarm {
 public:
  explicit Alarm(std::chrono::steady_clock::time_point end) {
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = kTime;
    event._sigev_un._tid = gettid();
    set_ = timer_create(CLOCK_MONOTONIC, &event, &timer_) == 0;
    const auto left = end - std::chrono::steady_clock::now() + std::chrono::seconds(1);
    const auto ns = std::max<long long>(1, std::chrono::nanoseconds(left).count());
    itimerspec when = {};
    when.it_value = {ns / 1'000'000'000, ns % 1'000'000'000};
    if (set_) timer_settime(timer_, 0, &when, nullptr);
  }
  ~Alarm() {
    if (set_) timer_delete(timer_);
  }

 private:
  timer_t timer_;
  bool set_;
};

void work(Launch& launch) {
  std::vector<std::byte> handler_stack(64 << 10);  // for the fiber whose stack is full
  stack_t now = {}, before = {};
  now.ss_sp = handler_stack.data();
  now.ss_size = handler_stack.size();
  sigaltstack(&now, &before);
  {
    Worker worker(launch);
    Alarm alarm(launch.end);
    t_worker = &worker;
    worker.run();
    t_worker = nullptr;
  }
  sigaltstack(&before, nullptr);
}

}  // namespace

u64 meet_in_warp(Meeting meeting, u32 mask, u64 value, u32 source, const Site& site) {
  return t_worker->meet_in_warp(meeting, mask, value, source, site);
}
int meet_in_block(Meeting meeting, bool value, const Site& site) {
  return t_worker->meet_in_block(meeting, value, site);
}
void yield(bool asleep) { t_worker->yield(asleep); }
void before_atomic() { t_worker->before_atomic(); }
void fail(const char* what, const Site& site) { t_worker->fail(what, text_of(site)); }

}  // namespace emulated

// --- undefined behaviour: what -fsanitize=undefined calls ---

struct UndefinedBehaviour {  // each kind's data begins so
  const char* file;
  unsigned line, column;
};

#define GIDS_UNDEFINED(name, text)                                                                 \
  extern "C" void __ubsan_handle_##name(const UndefinedBehaviour* found) {                         \
    if (emulated::t_worker) emulated::t_worker->fail(text, emulated::text_of(found->file, found->line)); \
    std::abort();                                                                                  \
  }
GIDS_UNDEFINED(type_mismatch_v1, "accesses an address that is null or not aligned to its type")
GIDS_UNDEFINED(shift_out_of_bounds, "shifts by more than the type has bits")
GIDS_UNDEFINED(out_of_bounds, "indexes an array beyond its end")
GIDS_UNDEFINED(divrem_overflow, "divides by zero")
GIDS_UNDEFINED(add_overflow, "adds signed integers beyond their range")
GIDS_UNDEFINED(sub_overflow, "subtracts signed integers beyond their range")
GIDS_UNDEFINED(mul_overflow, "multiplies signed integers beyond their range")
GIDS_UNDEFINED(negate_overflow, "negates the least signed integer")
GIDS_UNDEFINED(load_invalid_value, "reads a bool or enum that has no such value")
GIDS_UNDEFINED(invalid_builtin, "asks for the first or last bit of 0")
GIDS_UNDEFINED(pointer_overflow, "moves a pointer beyond the address space")
GIDS_UNDEFINED(builtin_unreachable, "reaches what is marked as unreachable")
GIDS_UNDEFINED(missing_return, "returns without a value")
GIDS_UNDEFINED(nonnull_arg, "passes null where none may be")
GIDS_UNDEFINED(nonnull_return_v1, "returns null where none may be")
GIDS_UNDEFINED(vla_bound_not_positive, "has an array without elements")

extern "C" void* emulated_allocate(std::size_t bytes, int zeroed) { return emulated::allocate(bytes, zeroed != 0); }
extern "C" void emulated_free(void* start) { emulated::release(start); }

// Runs a kernel to its end. Returns 0, or 1 with the first error's text.
extern "C" int emulated_launch(const emulated::Kernel* kernel, unsigned blocks, unsigned threads,
                               unsigned waiting_blocks_max, void** arguments, unsigned long long seed, double limit_s,
                               char* error, std::size_t error_bytes) {
  using namespace emulated;
  const auto limit = std::chrono::duration<double>(limit_s);
  Launch launch{.kernel = *kernel, .arguments = arguments, .blocks = blocks, .threads = threads,
                .waiting_blocks_max = waiting_blocks_max, .seed = seed,
                .end = std::chrono::steady_clock::now() +
                       std::chrono::duration_cast<std::chrono::steady_clock::duration>(limit)};
  Random random{seed};
  for (u32 i = 0; i < blocks; ++i) {
    launch.order.push_back(i);
    std::swap(launch.order[i], launch.order[random.below(i + 1)]);
  }
  dl_iterate_phdr(find_module, &launch);
  {
    SignalsCaught caught;
    std::vector<std::thread> others;
    for (u32 i = 1; i < std::min(blocks, kBlocksAtOnce); ++i) others.emplace_back([&] { work(launch); });
    work(launch);
    for (std::thread& other : others) other.join();
  }
  if (!launch.failed)
    if (const std::string damage = find_damage(); !damage.empty())
      launch.fail(std::string("kernel ") + kernel->name + " " + damage);
  if (!launch.failed) return 0;
  std::snprintf(error, error_bytes, "%s", launch.error.c_str());
  return 1;
}
