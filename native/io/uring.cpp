#include "io/uring.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>
#include <utility>

#include <poll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "io/clock.h"
#include "io/file.h"
#include "io/request.h"
#include "io/ring.h"

namespace gids::io {
namespace {

constexpr u64 chunk_bytes = 1ull << 30;      // the kernel's limit for one buffer
constexpr u32 chunks_max = 1024;             // entries of the buffer table
constexpr u64 pinned_bounce_max = 1u << 26;  // a larger pool is not registered: that would make all of it resident
constexpr u32 base_depth = 256;              // requests that keep a disk busy; more are for further rings
constexpr u64 counted_ns = 2'000'000;        // how often a thread tells its CPU time

u64 cpu_time(clockid_t clock) {
  timespec t{};
  clock_gettime(clock, &t);
  return static_cast<u64>(t.tv_sec) * 1'000'000'000 + static_cast<u64>(t.tv_nsec);
}

}  // namespace

Doorbell::Doorbell() : fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

Doorbell::~Doorbell() { ::close(fd); }

void Doorbell::ring() {
  if (hungry.exchange(false)) eventfd_write(fd, 1);
}

void Doorbell::clear() {
  eventfd_t count;
  eventfd_read(fd, &count);
}

// One thread's ring and requests.
class UringEngine::Worker {
 public:
  Worker(UringEngine& engine, Seat& seat, u32 number, u32 depth, u32 first_slot)
      : engine_(engine),
        seat_(seat),
        doorbell_(seat.doorbell),
        number_(number),
        ring_(depth + 1),
        requests_(depth) {
    for (u32 i = 0; i < depth; ++i) {
      requests_[i].slot = engine.bounce_->slot(first_slot + i);
      free_.push_back(&requests_[depth - 1 - i]);
    }
    finished_.reserve(depth);
    taken_.resize(depth);
    std::vector<int> fds;
    for (const File& f : engine.files_) fds.push_back(f.fd());
    fixed_files_ = ring_.register_files(fds.data(), static_cast<u32>(fds.size()));
    buffer_table_ = ring_.register_buffer_table(chunks_max);
    engine.add_note(ring_.features() + (fixed_files_ ? "" : ", files not registered"));
    register_chunks();
    poll_doorbell();
  }

  void run() {
    const u32 depth = static_cast<u32>(requests_.size());
    while (true) {
      const bool rests = number_ >= engine_.in_use_;
      if (!rests) fill();
      if (in_flight() == 0) {
        if (rests ? !rest() : engine_.drained()) return;
        continue;
      }
      // A full queue is refilled in groups, to save system calls; a queue with room waits for one
      // completion only, and then looks for new batches.
      enter(free_.empty() ? std::max({1u, std::min(8u, depth / 4), depth / 16}) : 1);
      reap();
      const u64 now = now_ns();
      if (now - counted_ns_ >= counted_ns) {
        seat_.cpu_ns = cpu_time(CLOCK_THREAD_CPUTIME_ID);
        counted_ns_ = now;
      }
      if (number_ == 0) engine_.follow_load(now);
    }
  }

 private:
  // Until the ring is in use again. False when the engine closes.
  bool rest() {
    const bool open = engine_.rest_until([&] { return number_ < engine_.in_use_ || chores_ != engine_.chores_; });
    register_chunks();
    return open;
  }

  u32 in_flight() const { return static_cast<u32>(requests_.size() - free_.size()); }

  void fill() {
    const auto room = static_cast<u32>(free_.size());
    if (room == 0) return;
    doorbell_.hungry = true;  // before the look at the queue: a batch that comes after it rings
    std::copy(free_.rbegin(), free_.rend(), taken_.begin());
    const u32 n = engine_.take(std::span(taken_).first(room), in_flight() == 0, chores_);
    free_.resize(room - n);
    if (n == room) doorbell_.hungry = false;
    else seat_.idle = true;
    register_chunks();
    for (u32 i = 0; i < n; ++i) issue(*taken_[i]);
  }

  void issue(Request& q) {
    const u32 pieces = q.scatter();
    io_uring_sqe* e = ring_.push();
    e->off = q.offset + q.position;
    e->user_data = reinterpret_cast<u64>(&q);
    if (pieces == 1) {
      auto* base = static_cast<std::byte*>(q.iov[0].iov_base);
      const int chunk = chunk_of(base, q.iov[0].iov_len);
      e->opcode = chunk >= 0 ? IORING_OP_READ_FIXED : IORING_OP_READ;
      e->buf_index = chunk >= 0 ? static_cast<u16>(chunk) : 0;
      e->addr = reinterpret_cast<u64>(base);
      e->len = static_cast<u32>(q.iov[0].iov_len);
    } else {
      e->opcode = IORING_OP_READV;
      e->addr = reinterpret_cast<u64>(q.iov.data());
      e->len = pieces;
    }
    e->fd = fixed_files_ ? static_cast<int>(q.file) : engine_.files_[q.file].fd();
    e->flags = fixed_files_ ? IOSQE_FIXED_FILE : 0;
  }

  void poll_doorbell() {
    io_uring_sqe* e = ring_.push();
    e->opcode = IORING_OP_POLL_ADD;
    e->fd = doorbell_.fd;
    e->poll_events = POLLIN;
    e->user_data = 0;  // no request
  }

  void enter(u32 wait) {
    const int error = -ring_.enter(wait);
    if (error == 0 || error == EINTR) return;
    if (error != EAGAIN && error != EBUSY) refused_ = refusals_max;
    if (++refused_ < refusals_max) {  // short of memory for requests, or completions overflowed: reap, then go on
      const timespec millisecond{0, 1'000'000};
      nanosleep(&millisecond, nullptr);
      return;
    }
    refused_ = 0;
    while (ring_.queued()) {  // the kernel takes no more: these requests fail instead of waiting for ever
      auto* q = reinterpret_cast<Request*>(ring_.pop().user_data);
      if (!q) continue;  // the doorbell: from now on a new batch waits for a completion
      q->error = error;
      finished_.push_back(q);
    }
  }

  void reap() {
    Stats tally;
    bool rung = false;
    ring_.reap([&](u64 data, i64 result) {
      if (data == 0) {
        rung = true;
        return;
      }
      auto& q = *reinterpret_cast<Request*>(data);
      if (engine_.advance(q, result, tally)) {
        finished_.push_back(&q);
      } else {
        again_.push_back(&q);
      }
    });
    if (rung) {
      doorbell_.clear();
      poll_doorbell();
    }
    for (Request* q : again_) issue(*q);
    again_.clear();
    for (Request* q : finished_) engine_.settle(*q, tally);
    engine_.finish(finished_, tally);
    free_.insert(free_.end(), finished_.begin(), finished_.end());
    if (!finished_.empty()) refused_ = 0;
    finished_.clear();
  }

  // Registers chunks that are new to this ring, and gives up forgotten ones. If the kernel refuses a chunk, reads
  // go into it all the same, without registration.
  void register_chunks() {
    std::vector<std::pair<u32, Chunk>> changed;
    {
      std::lock_guard lock(engine_.queue_mutex_);
      if (chores_ == engine_.chores_) return;
      for (u32 at = 0; at < engine_.chunks_.size(); ++at)
        if (engine_.chunks_[at].changed > chores_) changed.emplace_back(at, engine_.chunks_[at]);
      chores_ = engine_.chores_;
    }
    for (const auto& [at, c] : changed) {
      const int index = static_cast<int>(at);
      const bool had = std::erase_if(fixed_, [index](const Fixed& f) { return f.index == index; });
      std::shared_ptr<void> owner = c.owner.lock();
      if (!owner) {  // forgotten, perhaps before this ring saw it
        if (had) ring_.register_buffer(at, nullptr, 0);
        continue;
      }
      const int error = buffer_table_ ? ring_.register_buffer(at, c.base, c.bytes) : ENOSYS;
      if (error == 0) {
        fixed_.push_back({c.base, c.base + c.bytes, index, std::move(owner)});
      } else {
        engine_.add_note(error == ENOMEM   ? "memory not registered (RLIMIT_MEMLOCK)"
                         : error == ENOSYS ? "memory not registered (needs Linux 5.19)"
                                           : std::string("memory not registered (") + std::strerror(error) + ")");
      }
    }
    std::sort(fixed_.begin(), fixed_.end(), [](const Fixed& a, const Fixed& b) { return a.begin < b.begin; });
  }

  int chunk_of(const std::byte* base, size_t bytes) const {
    const auto after = std::upper_bound(fixed_.begin(), fixed_.end(), base,
                                        [](const std::byte* p, const Fixed& f) { return p < f.begin; });
    if (after == fixed_.begin()) return -1;
    const Fixed& f = *std::prev(after);
    return base + bytes <= f.end ? f.index : -1;
  }

  struct Fixed {
    const std::byte *begin, *end;
    int index;
    std::shared_ptr<void> owner;
  };
  static constexpr u32 refusals_max = 1000;

  UringEngine& engine_;
  Seat& seat_;
  Doorbell& doorbell_;
  const u32 number_;  // of the ring
  std::vector<Fixed> fixed_;  // by address; outlives the ring, which would write into memory that is given back
  Ring ring_;
  std::vector<Request> requests_;
  std::vector<Request*> free_, finished_, again_, taken_;
  u64 chores_ = 0;   // chunks that this ring has seen
  u64 counted_ns_ = 0;
  u32 refused_ = 0;  // enter() calls refused since the last completion
  bool fixed_files_ = false, buffer_table_ = false;
};

Options UringEngine::settle_options(Options o) {
  o.most_rings = o.threads ? 0 : o.most_rings;
  o.threads = std::min(o.threads ? o.threads : o.rings, o.depth);
  return o;
}

// That may follow the load. Their requests are those beyond what keeps the disks busy.
u32 UringEngine::extra_rings() const {
  const u32 rings = options_.threads, base = base_depth * rings;
  if (options_.most_rings <= rings || options_.depth <= base) return 0;
  return std::min(options_.most_rings - rings, (options_.depth - base) / extra_depth);
}

UringEngine::UringEngine(const std::vector<std::string>& paths, Options options)
    : Engine("uring", paths, settle_options(options)),
      bounce_(std::make_shared<BouncePool>(options_.depth, slot_bytes_)),
      in_use_(options_.threads),
      wanted_(options_.threads, options_.threads + extra_rings()),
      cpu_ns_(options_.threads + extra_rings()) {
  bounce_bytes_ = bounce_->bytes();
  if (bounce_bytes_ <= pinned_bounce_max) register_memory(bounce_->base(), bounce_bytes_, bounce_);
  std::vector<std::function<void(const Ready&)>> bodies;
  for (u32 i = 0; i < options_.threads; ++i) {
    Seat& seat = *seats_.emplace_back(std::make_unique<Seat>());
    bodies.push_back([this, &seat, i](const Ready& ready) { run(i, seat, ready); });
  }
  start(std::move(bodies));
}

// The thread of a ring.
void UringEngine::run(u32 ring, Seat& seat, const Ready& ready) {
  const u32 rings = options_.threads, first = options_.depth - extra_rings() * extra_depth;  // slot of the extra rings
  auto slot = [&](u32 i) { return i <= rings ? first * u64{i} / rings : first + u64{i - rings} * extra_depth; };
  std::unique_ptr<Worker> worker;
  try {
    const u32 begin = static_cast<u32>(slot(ring)), end = static_cast<u32>(slot(ring + 1));
    worker = std::make_unique<Worker>(*this, seat, ring, end - begin, begin);
  } catch (...) {
    ready(std::current_exception());
    return;
  }
  ready(nullptr);
  worker->run();
  worker.reset();
  std::lock_guard lock(queue_mutex_);  // closing: no submission rings any more
  seats_[ring].reset();
}

// Called often, by the first ring's thread.
void UringEngine::follow_load(u64 now) {
  const u64 passed = now - looked_ns_;
  if (wanted_.fixed() || passed < RingCount::window_ns) return;
  if (refused_.exchange(false)) {
    wanted_.stop(static_cast<u32>(seats_.size()) - 1);
    return use(wanted_.count());
  }
  RingLoad load{.waiting = true, .busy = true};
  {
    std::lock_guard lock(queue_mutex_);
    for (u32 i = 0; i < in_use_; ++i) {
      if (!seats_[i]) return;  // closing
      const u64 cpu = seats_[i]->cpu_ns, spent = cpu - std::exchange(cpu_ns_[i], cpu);
      load.waiting &= !seats_[i]->idle.exchange(false);
      load.busy &= spent * 10 >= passed * 9;
    }
  }
  const u64 requests = stats().requests, process = cpu_time(CLOCK_PROCESS_CPUTIME_ID);
  load.rate = static_cast<double>(requests - std::exchange(requests_, requests)) / static_cast<double>(passed);
  load.core_free = process - std::exchange(process_ns_, process) + passed <= options_.most_rings * passed;
  looked_ns_ = now;
  if (passed < 2 * RingCount::window_ns) use(wanted_.look(load));  // else it slept meanwhile
}

void UringEngine::use(u32 rings) {
  if (rings == in_use_) return;
  if (rings > seats_.size()) {
    const u32 ring = static_cast<u32>(seats_.size());
    Seat* seat;
    try {
      {
        std::lock_guard lock(queue_mutex_);
        seat = seats_.emplace_back(std::make_unique<Seat>()).get();
      }
      start_another([this, ring, seat] {
        run(ring, *seat, [this](std::exception_ptr failure) { refused_ = failure != nullptr; });
      });
    } catch (const std::exception&) {
      refused_ = true;
    }
  }
  {
    std::lock_guard lock(queue_mutex_);
    in_use_ = rings;
  }
  queue_cv_.notify_all();
}

void UringEngine::ring_doorbells() {
  for (const auto& seat : seats_)
    if (seat) seat->doorbell.ring();
}

void UringEngine::register_memory(std::byte* base, size_t bytes, std::shared_ptr<void> owner) {
  std::lock_guard lock(queue_mutex_);
  for (u64 at = 0; at < bytes; at += chunk_bytes) {
    auto place = std::find_if(chunks_.begin(), chunks_.end(), [](const Chunk& c) { return !c.base; });
    if (place == chunks_.end()) {
      if (chunks_.size() == chunks_max) return;
      place = chunks_.insert(place, Chunk{});
    }
    *place = {base + at, std::min<u64>(chunk_bytes, bytes - at), owner, ++chores_};
  }
}

void UringEngine::forget_memory(const std::byte* base, size_t bytes) {
  if (getpid() != pid_) return;
  {
    std::lock_guard lock(queue_mutex_);
    for (Chunk& c : chunks_)
      if (c.base >= base && c.base < base + bytes) c = {nullptr, 0, {}, ++chores_};
  }
  queue_cv_.notify_all();
}

}  // namespace gids::io
