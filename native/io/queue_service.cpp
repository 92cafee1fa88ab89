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

static_assert(queue::try_again == EAGAIN && queue::broken == EPROTO && queue::timed_out == ETIMEDOUT &&
                  queue::canceled == ECANCELED && queue::invalid == EINVAL && queue::corrupt == EBADMSG,
              "the device code spells the errors as numbers");

constexpr u32 take_max = 16384;       // submissions of one batch of reads: the engine sorts and merges them
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

// One queue pair and the requests that were taken from it. serve() belongs to the service thread, ended() to
// the engine's threads. Kept alive by the reads in flight.
class QueueService::Pair : public std::enable_shared_from_this<Pair> {
 public:
  Pair(const queue::Pair& pair, const std::vector<QueueTable>& tables, std::shared_ptr<Wake> wake,
       std::shared_ptr<void> owner)
      : q_(pair), tables_(tables), wake_(std::move(wake)), owner_(std::move(owner)), slots_(pair.depth()) {}

  // One pass over the pair. False when there was nothing to do.
  bool serve(Engine& engine, u64 timeout_ns);
  void ended(const Reads& batch, u64 ticket, int error);
  bool abandoned() const { return queue::read_abandoned(q_); }

  u64 arm() { return armed_.fetch_add(1, std::memory_order_relaxed); }
  bool armed() const { return armed_.load(std::memory_order_relaxed) > completed_.load(std::memory_order_relaxed); }

  // The end: cancel_reads(), then settle() until it says that all is answered, then close().
  void cancel_reads(Engine& engine);
  bool settle(u64 timeout_ns);
  void close();
  void add_to(QueueStats& stats) const;

 private:
  // A slot as the service sees it: the request that was taken last, and whether it was answered.
  struct Slot {
    std::atomic<u64> open{0};          // ticket + 1 while it waits for its answer, answering, or 0
    std::atomic<bool> reading{false};  // the engine may still write to the staging page
    u64 taken_ns = 0;
    queue::Request request = 0;
  };
  static constexpr u64 answering = ~u64{0};

  Slot& slot(u64 ticket) { return slots_[q_.slot(ticket)]; }
  bool answer(u64 ticket, int error);
  bool intact(u64 ticket);
  void take_doorbells();
  bool take_submissions(Engine& engine, u64 now);
  int admit(u64 ticket, queue::Request request, Reads& batch);
  bool pass_answered(u64 now, u64 timeout_ns);
  bool complete_rounds();
  std::shared_ptr<Reads> free_batch();
  void submit(Engine& engine, std::shared_ptr<Reads> batch);

  const queue::Pair q_;
  const std::vector<QueueTable> tables_;
  const std::shared_ptr<Wake> wake_;
  const std::shared_ptr<void> owner_;
  std::vector<Slot> slots_;

  // oldest_ <= cursor_ <= oldest_ + depth: below oldest_ all is answered, from cursor_ on nothing was taken.
  u64 oldest_ = 0, cursor_ = 0;
  u64 rounds_rung_ = 0, rung_end_ = 0;
  std::deque<u64> round_ends_;  // of the rounds that were rung and are not complete
  std::deque<std::shared_ptr<Reads>> batches_;

  std::atomic<u64> armed_{0}, completed_{0};
  std::atomic<u64> taken_{0}, failed_{0}, timed_out_{0}, corrupt_{0}, late_{0};
};

// Reads of one pair. Read::cookie is the ticket.
class QueueService::Reads final : public Batch {
 public:
  explicit Reads(std::shared_ptr<Pair> pair) : pair_(std::move(pair)) {}
  void done(const Read& read, const std::byte*, int error) noexcept override {
    pair_->ended(*this, read.cookie, error);
  }
  mutable std::atomic<u64> left{0};

 private:
  const std::shared_ptr<Pair> pair_;
};

// --- answers ---

// Whoever closes the request writes its status: so each has one, whether its read, the time-out or close()
// comes first. False when it was answered before. A page is checked in between: so close() waits for the check.
bool QueueService::Pair::answer(u64 ticket, int error) {
  Slot& s = slot(ticket);
  u64 expected = ticket + 1;
  if (!s.open.compare_exchange_strong(expected, answering, std::memory_order_acq_rel)) return false;
  if (error == 0 && !intact(ticket)) {
    error = queue::corrupt;
    corrupt_.fetch_add(1, std::memory_order_relaxed);
  }
  if (error) failed_.fetch_add(1, std::memory_order_relaxed);
  queue::write_status(q_, ticket, error);
  s.open.store(0, std::memory_order_release);
  return true;
}

bool QueueService::Pair::intact(u64 ticket) {
  const queue::Request request = slot(ticket).request;
  const QueueTable& t = tables_[queue::table_of(request)];
  if (!t.checksums) return true;
  const auto* page = reinterpret_cast<const std::byte*>(q_.page(ticket));
  return store::crc32c(page, t.page_bytes) == store::value_at(&t.checksums[queue::page_of(request)]);
}

void QueueService::Pair::ended(const Reads& batch, u64 ticket, int error) {
  // Before the answer, for with it the slot may be posted again.
  slot(ticket).reading.store(false, std::memory_order_release);
  if (!answer(ticket, error)) late_.fetch_add(1, std::memory_order_relaxed);
  if (batch.left.fetch_sub(1, std::memory_order_acq_rel) == 1 && wake_->asleep.load(std::memory_order_relaxed))
    wake_->ring();
}

// --- the service thread's pass ---

bool QueueService::Pair::serve(Engine& engine, u64 timeout_ns) {
  const u64 now = now_ns();
  take_doorbells();
  bool busy = pass_answered(now, timeout_ns);
  busy |= take_submissions(engine, now);
  busy |= complete_rounds();
  return busy;
}

void QueueService::Pair::take_doorbells() {
  u32 count;
  while (queue::read_doorbell(q_, rounds_rung_, count)) {
    rung_end_ += count;
    round_ends_.push_back(rung_end_);
    ++rounds_rung_;
  }
}

// Requests were taken in the order of their tickets, so their times run out in that order too.
bool QueueService::Pair::pass_answered(u64 now, u64 timeout_ns) {
  const u64 before = oldest_;
  for (; oldest_ < cursor_; ++oldest_) {
    const Slot& s = slot(oldest_);
    if (s.open.load(std::memory_order_acquire) == 0) continue;
    if (now - s.taken_ns < timeout_ns || !answer(oldest_, queue::timed_out)) break;
    timed_out_.fetch_add(1, std::memory_order_relaxed);
  }
  return oldest_ != before;
}

bool QueueService::Pair::take_submissions(Engine& engine, u64 now) {
  const u64 end = std::min(cursor_ + take_max, oldest_ + q_.depth());
  const u64 before = cursor_;
  std::shared_ptr<Reads> batch;
  for (; cursor_ < end; ++cursor_) {
    queue::Request request;
    const bool there = queue::read_entry(q_, cursor_, request);
    if (!there && cursor_ >= rung_end_) break;
    Slot& s = slot(cursor_);
    s.taken_ns = now;
    s.open.store(cursor_ + 1, std::memory_order_relaxed);
    if (!batch) batch = free_batch();
    const int error = there ? admit(cursor_, request, *batch) : queue::broken;
    if (error) answer(cursor_, error);
  }
  if (cursor_ == before) return false;
  taken_.fetch_add(cursor_ - before, std::memory_order_relaxed);
  submit(engine, std::move(batch));
  return true;
}

// Adds the request's read to the batch, or says why not.
int QueueService::Pair::admit(u64 ticket, queue::Request request, Reads& batch) {
  const u32 index = queue::table_of(request);
  const u64 page = queue::page_of(request);
  if (index >= tables_.size() || page >= tables_[index].page_count) return queue::invalid;
  Slot& s = slot(ticket);
  // A read that timed out has not ended: it may yet overwrite the staging page.
  if (s.reading.load(std::memory_order_acquire)) return queue::timed_out;
  s.reading.store(true, std::memory_order_relaxed);
  s.request = request;
  const QueueTable& t = tables_[index];
  batch.reads.push_back({.offset = page / t.file_count * t.page_bytes,
                         .dest = reinterpret_cast<std::byte*>(q_.page(ticket)),
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
  batch->left.store(batch->reads.size(), std::memory_order_relaxed);
  int error = 0;
  try {
    if (!batch->reads.empty()) engine.submit(batch);
  } catch (const std::exception&) {
    error = queue::canceled;  // the engine is closed
  }
  if (error)
    for (const Read& read : batch->reads) ended(*batch, read.cookie, error);
  batches_.push_back(std::move(batch));
}

bool QueueService::Pair::complete_rounds() {
  const u64 before = completed_.load(std::memory_order_relaxed);
  u64 completed = before;
  for (; !round_ends_.empty() && round_ends_.front() <= oldest_; ++completed) round_ends_.pop_front();
  if (completed == before) return false;
  completed_.store(completed, std::memory_order_relaxed);
  queue::write_completed(q_, completed);
  return true;
}

void QueueService::Pair::cancel_reads(Engine& engine) {
  for (const auto& batch : batches_)
    if (!batch->finished()) engine.cancel(*batch);
}

bool QueueService::Pair::settle(u64 timeout_ns) {
  pass_answered(now_ns(), timeout_ns);
  return oldest_ == cursor_;
}

// What was posted and not taken has no status: `closed` tells its waiters. Lets go of the batches, which hold
// the pair: the engine keeps those that it still reads.
void QueueService::Pair::close() {
  queue::write_completed(q_, queue::closed);
  batches_.clear();
}

void QueueService::Pair::add_to(QueueStats& stats) const {
  stats.taken += taken_.load(std::memory_order_relaxed);
  stats.failed += failed_.load(std::memory_order_relaxed);
  stats.timed_out += timed_out_.load(std::memory_order_relaxed);
  stats.corrupt += corrupt_.load(std::memory_order_relaxed);
  stats.late += late_.load(std::memory_order_relaxed);
  stats.rounds += completed_.load(std::memory_order_relaxed);
}

// --- the service ---

// A thread and the pairs that it serves.
struct QueueService::Worker {
  std::shared_ptr<Wake> wake = std::make_shared<Wake>();
  std::vector<std::shared_ptr<Pair>> pairs{};
  std::thread thread{};
};

QueueService::QueueService(std::shared_ptr<Engine> engine, std::vector<QueueTable> tables,
                           std::vector<queue::Pair> pairs, std::shared_ptr<void> owner, u32 timeout_ms)
    : pid_(getpid()), timeout_ns_(u64{timeout_ms} * 1'000'000), engine_(std::move(engine)) {
  require(!pairs.empty(), "needs at least one queue pair");
  require(tables.size() <= queue::tables_max, "can have at most " + std::to_string(queue::tables_max) + " tables");
  for (size_t i = 0; i < tables.size(); ++i) {
    const QueueTable& t = tables[i];
    const std::string name = "table " + std::to_string(i);
    require(t.file_count >= 1 && t.page_bytes >= 1, name + " has no files or no bytes");
    require(t.page_count <= u64{1} << queue::page_bits, name + " has more than 2^48 pages");
    require(t.page_count / t.file_count < offset_max / t.page_bytes, name + " has more bytes than any file");
    require(u64{t.first_file} + t.file_count <= engine_->file_count(),
            name + " has files " + std::to_string(t.first_file) + " to " +
                std::to_string(u64{t.first_file} + t.file_count - 1) + "; the engine has " +
                std::to_string(engine_->file_count()));
    require(t.page_bytes <= engine_->max_read_bytes(),
            name + " has pages of " + std::to_string(t.page_bytes) + " B; the engine was opened for reads of " +
                std::to_string(engine_->max_read_bytes()) + " B at most (max_read_bytes)");
    for (const queue::Pair& q : pairs)
      require(t.page_bytes <= q.slot_bytes, name + " has pages of " + std::to_string(t.page_bytes) +
                                                " B; the staging slots hold " + std::to_string(q.slot_bytes) + " B");
  }
  const size_t threads = std::min<size_t>(pairs.size(), std::max(1u, std::thread::hardware_concurrency()));
  for (size_t i = 0; i < threads; ++i) workers_.push_back(std::make_unique<Worker>());
  for (size_t p = 0; p < pairs.size(); ++p) {
    Worker& worker = *workers_[p % threads];
    pairs_.push_back(std::make_shared<Pair>(pairs[p], tables, worker.wake, owner));
    worker.pairs.push_back(pairs_.back());
  }
  try {
    for (const auto& worker : workers_)
      worker->thread = start_thread("gids-queue", [this, w = worker.get()] { run(*w); });
  } catch (...) {  // the threads that did start are ended here
    close();
    throw;
  }
}

QueueService::~QueueService() {
  close();
  // In a forked child the threads do not exist, so they can be neither joined nor destroyed.
  for (const auto& worker : workers_)
    if (worker->thread.joinable()) new std::thread(std::move(worker->thread));
}

u64 QueueService::arm(u32 pair) {
  if (getpid() != pid_)
    throw std::runtime_error("the request queue was opened before a fork: open a new one in this process");
  if (broken())
    throw std::runtime_error(
        "the request queue is broken: a kernel gave up waiting for an answer, and the memory of its request may still "
        "be written to. Close the loader and make a new one");
  if (stop_.load(std::memory_order_acquire)) throw std::runtime_error("the request queue is closed");
  const u64 round = pairs_.at(pair)->arm();
  workers_[pair % workers_.size()]->wake->ring();
  return round;
}

void QueueService::close() {
  if (getpid() != pid_) return;
  std::lock_guard lock(close_mutex_);
  stop_.store(true, std::memory_order_release);
  for (const auto& worker : workers_) worker->wake->ring();
  for (const auto& worker : workers_)
    if (worker->thread.joinable()) worker->thread.join();
}

bool QueueService::broken() const {
  return std::any_of(pairs_.begin(), pairs_.end(), [](const auto& pair) { return pair->abandoned(); });
}

QueueStats QueueService::stats() const {
  QueueStats stats;
  for (const auto& pair : pairs_) pair->add_to(stats);
  stats.sleeps = sleeps_.load(std::memory_order_relaxed);
  return stats;
}

void QueueService::run(Worker& worker) {
  prctl(PR_SET_TIMERSLACK, 1ul);  // the default rounds a pause up by 50 us
  u32 idle = 0;
  while (!stop_.load(std::memory_order_acquire) && !broken()) {
    bool busy = false, armed = false;
    for (const auto& pair : worker.pairs) {
      busy |= pair->serve(*engine_, timeout_ns_);
      armed |= pair->armed();
    }
    idle = busy ? 0 : idle + 1;
    if (!armed) {
      sleeps_.fetch_add(1, std::memory_order_relaxed);
      worker.wake->sleep(forever);  // arm() counts first and rings then: it is not missed
      idle = 0;
    } else if (idle > yields) {
      worker.wake->sleep(std::min(pause_max_ns, u64{1000} << std::min(idle - yields, 6u)));
    } else if (idle) {
      sched_yield();
    }
  }
  for (const auto& other : workers_) other->wake->ring();  // if the queue is broken, they sleep and do not know
  finish(worker);
}

void QueueService::finish(Worker& worker) {
  for (const auto& pair : worker.pairs) pair->cancel_reads(*engine_);
  for (const auto& pair : worker.pairs) {
    while (!pair->settle(timeout_ns_)) worker.wake->sleep(pause_max_ns);
    pair->close();
  }
}

}  // namespace gids::io
