#include "io/queue_service.h"

#include <algorithm>
#include <cerrno>
#include <deque>
#include <stdexcept>
#include <string>
#include <system_error>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "io/clock.h"
#include "io/start_thread.h"
#include "store/crc32c.h"
#include "store/mapped_file.h"

namespace gids::io {
namespace {

static_assert(queue::broken == EPROTO && queue::timed_out == ETIMEDOUT &&
                  queue::canceled == ECANCELED && queue::invalid == EINVAL && queue::corrupt == EBADMSG,
              "the device code spells the errors as numbers");

constexpr u64 take_max = 16384;       // requests of one batch of reads: the engine sorts and merges them
constexpr u32 yields = 32;            // idle polls before the thread sleeps between them
constexpr u64 pause_max_ns = 50'000;  // the longest such sleep
constexpr u64 forever = ~u64{0};

void require(bool fine, const std::string& what) {
  if (!fine) throw std::invalid_argument("queue service: " + what);
}

}  // namespace

// The eventfd on which the thread sleeps. Outlives the service: late completions ring too.
struct QueueService::Wake {
  Wake() : fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd for the request queue");
  }
  ~Wake() { ::close(fd); }
  Wake(const Wake&) = delete;

  void ring() const {
    const u64 one = 1;
    [[maybe_unused]] const auto n = write(fd, &one, sizeof one);  // fails only when it is rung already
  }
  void sleep(u64 ns) {
    pollfd p{fd, POLLIN, 0};
    const timespec limit{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
    asleep.store(true, std::memory_order_relaxed);
    ppoll(&p, 1, ns == forever ? nullptr : &limit, nullptr);
    asleep.store(false, std::memory_order_relaxed);
    u64 rings;
    [[maybe_unused]] const auto n = read(fd, &rings, sizeof rings);
  }

  const int fd;
  std::atomic<bool> asleep{false};  // a hint: who misses it costs a pause at most
};

// The queue pair and the rounds that were taken from it. serve() belongs to the service thread, ended() to the engine's
// threads. Kept alive by the reads in flight.
class QueueService::Pair : public std::enable_shared_from_this<Pair> {
 public:
  Pair(const queue::Pair& pair, std::vector<QueueTable> tables, std::shared_ptr<Wake> wake, std::shared_ptr<void> owner)
      : q_(pair), tables_(std::move(tables)), wake_(std::move(wake)), owner_(std::move(owner)),
        slots_(u64{pair.rounds_max} * pair.round_max), rounds_(pair.rounds_max) {}

  // One pass over the pair. False when there was nothing to do.
  bool serve(Engine& engine, u64 timeout_ns);
  void ended(u64 ticket, int error);
  bool abandoned() const { return queue::read_abandoned(q_); }

  u64 arm() { return armed_.fetch_add(1, std::memory_order_relaxed); }
  bool armed() const { return armed_.load(std::memory_order_relaxed) > answered_.load(std::memory_order_relaxed); }

  // The end: cancel_reads(), then settle() until it says that all is answered, then close().
  void cancel_reads(Engine& engine);
  bool settle(u64 timeout_ns);
  void close();
  void add_to(QueueStats& stats) const;

 private:
  // A request's ticket is round * round_max + its place in the round.
  struct Slot {
    std::atomic<u64> open{0};  // ticket + 1 while it waits for its answer, answering, or 0
    u64 page = 0;
  };
  static constexpr u64 answering = ~u64{0};
  // The round that has a place, or had it last.
  struct Round {
    u32 table = 0, count = 0;
    u64 taken_ns = 0;
    std::atomic<u32> left{0}, failed{0};  // requests without an answer; with an error
    std::atomic<u32> reading{0};          // reads that the engine may still write to staging, also of a round before
  };

  Slot& slot(u64 ticket) { return slots_[ticket % slots_.size()]; }
  Round& round(u64 number) { return rounds_[q_.place(number)]; }
  std::byte* staging(u64 ticket, u32 page_bytes) const {
    return reinterpret_cast<std::byte*>(q_.pages(ticket / q_.round_max)) + ticket % q_.round_max * page_bytes;
  }
  bool answer(u64 ticket, int error);
  bool intact(u64 ticket);
  bool take_round(Engine& engine, u64 now);
  int admit(u64 ticket, int refused, Reads& batch);
  bool answer_rounds(u64 now, u64 timeout_ns);
  std::shared_ptr<Reads> free_batch();
  void submit(Engine& engine, std::shared_ptr<Reads> batch);

  const queue::Pair q_;
  const std::vector<QueueTable> tables_;
  const std::shared_ptr<Wake> wake_;
  const std::shared_ptr<void> owner_;
  std::vector<Slot> slots_;
  std::vector<Round> rounds_;
  u64 rung_ = 0;  // rounds below were taken
  std::deque<std::shared_ptr<Reads>> batches_;

  std::atomic<u64> armed_{0}, answered_{0};
  std::atomic<u64> taken_{0}, failed_{0}, timed_out_{0}, corrupt_{0}, late_{0};
};

// Read::cookie is the ticket.
class QueueService::Reads final : public Batch {
 public:
  explicit Reads(std::shared_ptr<Pair> pair) : pair_(std::move(pair)) {}
  void done(const Read& read, const std::byte*, int error) noexcept override { pair_->ended(read.cookie, error); }

 private:
  const std::shared_ptr<Pair> pair_;
};

// --- answers ---

// Whoever closes the request writes its error: so each has one, whether its read, the time-out or close()
// comes first. False when it was answered before. A page is checked in between: so close() waits for the check.
bool QueueService::Pair::answer(u64 ticket, int error) {
  Slot& s = slot(ticket);
  u64 expected = ticket + 1;
  if (!s.open.compare_exchange_strong(expected, answering, std::memory_order_acq_rel)) return false;
  if (error == 0 && !intact(ticket)) {
    error = queue::corrupt;
    corrupt_.fetch_add(1, std::memory_order_relaxed);
  }
  const u64 number = ticket / q_.round_max;
  Round& r = round(number);
  queue::errors_of(q_.answer(number))[ticket % q_.round_max] = error;
  if (error) {
    r.failed.fetch_add(1, std::memory_order_relaxed);
    failed_.fetch_add(1, std::memory_order_relaxed);
  }
  s.open.store(0, std::memory_order_release);
  // acq_rel: the errors come before the answer of the round.
  if (r.left.fetch_sub(1, std::memory_order_acq_rel) == 1 && wake_->asleep.load(std::memory_order_relaxed))
    wake_->ring();
  return true;
}

bool QueueService::Pair::intact(u64 ticket) {
  const QueueTable& t = tables_[round(ticket / q_.round_max).table];
  if (!t.checksums) return true;
  return store::crc32c(staging(ticket, t.page_bytes), t.page_bytes) ==
         store::value_at(&t.checksums[slot(ticket).page]);
}

void QueueService::Pair::ended(u64 ticket, int error) {
  // Before the answer, for with it the place may be posted to again.
  round(ticket / q_.round_max).reading.fetch_sub(1, std::memory_order_release);
  if (!answer(ticket, error)) late_.fetch_add(1, std::memory_order_relaxed);
}

// --- the service thread's pass ---

bool QueueService::Pair::serve(Engine& engine, u64 timeout_ns) {
  const u64 now = now_ns();
  bool busy = answer_rounds(now, timeout_ns);
  while (take_round(engine, now)) busy = true;
  return busy;
}

// Rounds were taken in order, so their times run out in that order too.
bool QueueService::Pair::answer_rounds(u64 now, u64 timeout_ns) {
  const u64 before = answered_.load(std::memory_order_relaxed);
  u64 number = before;
  for (; number < rung_; ++number) {
    Round& r = round(number);
    if (r.left.load(std::memory_order_acquire) && now - r.taken_ns >= timeout_ns)
      for (u64 i = 0; i < r.count; ++i)
        if (answer(number * q_.round_max + i, queue::timed_out)) timed_out_.fetch_add(1, std::memory_order_relaxed);
    if (r.left.load(std::memory_order_acquire)) break;
    answered_.store(number + 1, std::memory_order_relaxed);
    queue::write_answer(q_, number, queue::answer(number, r.failed.load(std::memory_order_relaxed)));
  }
  return number != before;
}

bool QueueService::Pair::take_round(Engine& engine, u64 now) {
  u32 table, count;
  if (!queue::read_doorbell(q_, rung_, table, count)) return false;
  Round& r = round(rung_);
  // A read that timed out has not ended: it may yet overwrite any page of the place.
  const bool overwritten = r.reading.load(std::memory_order_acquire) != 0;
  const int refused = table >= tables_.size() ? queue::invalid : overwritten ? queue::timed_out : 0;
  r.table = table;
  r.count = count;
  r.taken_ns = now;
  r.failed.store(0, std::memory_order_relaxed);
  r.left.store(count, std::memory_order_relaxed);
  taken_.fetch_add(count, std::memory_order_relaxed);
  const u64 begin = rung_++ * q_.round_max, end = begin + count;
  for (u64 first = begin; first < end; first += take_max) {
    std::shared_ptr<Reads> batch = free_batch();
    for (u64 ticket = first; ticket < std::min(first + take_max, end); ++ticket) {
      slot(ticket).open.store(ticket + 1, std::memory_order_relaxed);
      if (const int error = admit(ticket, refused, *batch)) answer(ticket, error);
    }
    submit(engine, std::move(batch));
  }
  return true;
}

// Adds the request's read to the batch, or says why not.
int QueueService::Pair::admit(u64 ticket, int refused, Reads& batch) {
  queue::Request page;
  if (!queue::read_entry(q_, ticket / q_.round_max, ticket % q_.round_max, page)) return queue::broken;
  if (refused) return refused;
  Round& r = round(ticket / q_.round_max);
  const QueueTable& t = tables_[r.table];
  if (page >= t.page_count) return queue::invalid;
  slot(ticket).page = page;
  r.reading.fetch_add(1, std::memory_order_relaxed);
  batch.reads.push_back({.offset = page / t.file_count * t.page_bytes,
                         .dest = staging(ticket, t.page_bytes),
                         .bytes = t.page_bytes,
                         .file = t.first_file + static_cast<u32>(page % t.file_count),
                         .cookie = ticket});
  return 0;
}

// Batches end about in the order of their submission. Each that has not ended has a slot that is being read,
// so there are never more than slots, and a few on their way.
std::shared_ptr<QueueService::Reads> QueueService::Pair::free_batch() {
  for (size_t tries = std::min<size_t>(batches_.size(), 4); tries; --tries) {
    std::shared_ptr<Reads> batch = std::move(batches_.front());
    batches_.pop_front();
    if (batch->finished()) {
      batch->reads.clear();
      return batch;
    }
    batches_.push_back(std::move(batch));
  }
  return std::make_shared<Reads>(shared_from_this());
}

void QueueService::Pair::submit(Engine& engine, std::shared_ptr<Reads> batch) {
  int error = 0;
  try {
    if (!batch->reads.empty()) engine.submit(batch);
  } catch (const std::exception&) {
    error = queue::canceled;  // the engine is closed
  }
  if (error)
    for (const Read& read : batch->reads) ended(read.cookie, error);
  batches_.push_back(std::move(batch));
}

void QueueService::Pair::cancel_reads(Engine& engine) {
  for (const auto& batch : batches_)
    if (!batch->finished()) engine.cancel(*batch);
}

bool QueueService::Pair::settle(u64 timeout_ns) {
  answer_rounds(now_ns(), timeout_ns);
  return answered_.load(std::memory_order_relaxed) == rung_;
}

// Releases all waiters. Lets go of the batches, which hold the pair: the engine keeps those that it still reads.
void QueueService::Pair::close() {
  for (u64 place = 0; place < q_.rounds_max; ++place) queue::write_answer(q_, place, queue::closed);
  batches_.clear();
}

void QueueService::Pair::add_to(QueueStats& stats) const {
  stats.taken += taken_.load(std::memory_order_relaxed);
  stats.failed += failed_.load(std::memory_order_relaxed);
  stats.timed_out += timed_out_.load(std::memory_order_relaxed);
  stats.corrupt += corrupt_.load(std::memory_order_relaxed);
  stats.late += late_.load(std::memory_order_relaxed);
  stats.rounds += answered_.load(std::memory_order_relaxed);
}

// --- the service ---

QueueService::QueueService(std::shared_ptr<Engine> engine, std::vector<QueueTable> tables, const queue::Pair& pair,
                           std::shared_ptr<void> owner, u32 timeout_ms)
    : pid_(getpid()), timeout_ns_(u64{timeout_ms} * 1'000'000), engine_(std::move(engine)),
      wake_(std::make_shared<Wake>()) {
  require(tables.size() <= queue::tables_max, "can have at most " + std::to_string(queue::tables_max) + " tables");
  for (size_t i = 0; i < tables.size(); ++i) {
    const QueueTable& t = tables[i];
    const std::string name = "table " + std::to_string(i);
    require(t.file_count >= 1 && t.page_bytes >= 1, name + " has no files or no bytes");
    require(t.page_count / t.file_count < offset_max / t.page_bytes, name + " has more bytes than any file");
    require(t.page_count <= u64{1} << queue::lap_shift, name + " has more than 2^40 pages");
    require(u64{t.first_file} + t.file_count <= engine_->file_count(),
            name + " has files " + std::to_string(t.first_file) + " to " +
                std::to_string(u64{t.first_file} + t.file_count - 1) + "; the engine has " +
                std::to_string(engine_->file_count()));
    require(t.page_bytes <= engine_->max_read_bytes(),
            name + " has pages of " + std::to_string(t.page_bytes) + " B; the engine was opened for reads of " +
                std::to_string(engine_->max_read_bytes()) + " B at most (max_read_bytes)");
    require(u64{t.page_bytes} * pair.round_max <= pair.round_bytes,
            name + " has pages of " + std::to_string(t.page_bytes) + " B; the staging slots hold " +
                std::to_string(pair.round_bytes / pair.round_max) + " B");
  }
  pair_ = std::make_shared<Pair>(pair, std::move(tables), wake_, std::move(owner));
  thread_ = start_thread("gids-queue", [this] { run(); });
}

QueueService::~QueueService() {
  close();
  // In a forked child the thread does not exist, so it can be neither joined nor destroyed.
  if (thread_.joinable()) new std::thread(std::move(thread_));
}

u64 QueueService::arm() {
  if (getpid() != pid_)
    throw std::runtime_error("the request queue was opened before a fork: open a new one in this process");
  if (broken())
    throw std::runtime_error(
        "the request queue is broken: a kernel gave up waiting for an answer, and the memory of its request may still "
        "be written to. Close the loader and make a new one");
  if (stop_.load(std::memory_order_acquire)) throw std::runtime_error("the request queue is closed");
  const u64 round = pair_->arm();
  wake_->ring();
  return round;
}

void QueueService::close() {
  if (getpid() != pid_) return;
  std::lock_guard lock(close_mutex_);
  stop_.store(true, std::memory_order_release);
  wake_->ring();
  if (thread_.joinable()) thread_.join();
}

bool QueueService::broken() const { return pair_->abandoned(); }

QueueStats QueueService::stats() const {
  QueueStats stats;
  pair_->add_to(stats);
  stats.sleeps = sleeps_.load(std::memory_order_relaxed);
  return stats;
}

void QueueService::run() {
  prctl(PR_SET_TIMERSLACK, 1ul);  // the default rounds a pause up by 50 us
  u32 idle = 0;
  while (!stop_.load(std::memory_order_acquire) && !broken()) {
    idle = pair_->serve(*engine_, timeout_ns_) ? 0 : idle + 1;
    if (!pair_->armed()) {
      sleeps_.fetch_add(1, std::memory_order_relaxed);
      wake_->sleep(forever);  // arm() counts first and rings then: it is not missed
      idle = 0;
    } else if (idle > yields) {
      wake_->sleep(std::min(pause_max_ns, u64{1000} << std::min(idle - yields, 6u)));
    } else if (idle) {
      sched_yield();
    }
  }
  pair_->cancel_reads(*engine_);
  while (!pair_->settle(timeout_ns_)) wake_->sleep(pause_max_ns);
  pair_->close();
}

}  // namespace gids::io
