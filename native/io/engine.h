// The I/O engine: reads pieces of shard files into memory, out of order, with bounded depth.
// Called by the cache (page fills) and by bind/ (Python). Knows files, offsets and buffers; knows
// nothing of tables, pages or minibatches.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <sys/types.h>

#include "gids/target.h"
#include "io/latency.h"

namespace gids::io {

class File;
struct Request;

// One contiguous piece of one file. Offset, length and destination that are multiples of Engine::alignment()
// are read without a copy (a destination may do with less); others through a bounce buffer, from the
// enclosing aligned extent. `dest == nullptr` asks for a bounce buffer of the engine's: the
// bytes are then only valid inside Batch::done.
struct Read {
  u64 offset;
  std::byte* dest;
  u32 bytes;
  u32 file;
  u64 cookie;  // the caller's own; the engine hands it back untouched
};
static_assert(sizeof(Read) == 32);

constexpr u32 threads_max = 1024;         // of an engine
constexpr u64 offset_max = u64{1} << 62;  // of a read

// A set of reads submitted together, and the sink of their completions. Kept alive by the engine
// until the last completion; several batches are in flight at once. A finished batch may be submitted
// again. A batch must not own its engine: the engine's own thread may drop the last reference to it.
class Batch {
 public:
  virtual ~Batch() = default;

  // Called once per read, from an engine thread, in any order, possibly from several threads at once.
  // error: 0, or a positive errno (ENODATA: the file ended early; ECANCELED: see Engine::cancel), with
  // which data is null. Must not block and must not throw.
  virtual void done(const Read& read, const std::byte* data, int error) noexcept = 0;

  // Waits until every read is done. False when `timeout_ms` passed first.
  bool wait_for(u32 timeout_ms);
  void wait();
  bool finished() const { return left_.load(std::memory_order_acquire) == 0; }

  std::vector<Read> reads;  // sorted by (file, offset) at submission; fixed once submit() returns

 private:
  friend class Engine;
  struct Run {  // reads of one file that are not yet issued
    u32 begin, end;
  };
  void complete(u32 count);

  // Reads not done, plus one that the thread which completed the last read takes away when it is through
  // with the batch. Zero before the first submission.
  std::atomic<u64> left_{0};
  std::mutex mutex_;
  std::condition_variable cv_;
  std::shared_ptr<Batch> self_;  // set from submission to the last completion
  std::vector<Run> runs_;        // served in turn, so that all SSDs are busy; guarded by the engine's queue mutex
  size_t turn_ = 0;              // the run to serve next; guarded by the engine's queue mutex
};

struct Options {
  u32 depth = 256;                 // requests in flight
  u32 threads = 0;                 // 0: `rings` (uring), `depth` (threads), one per core (mmap)
  u32 max_read_bytes = 1u << 20;   // largest Read::bytes that will be submitted
  u32 max_merge_bytes = 1u << 17;  // neighboring reads are merged up to this size; 0: never
  bool direct = true;              // O_DIRECT
  u32 rings = 1, most_rings = 1;   // threads of the engine uring where `threads` is 0: at first, and at most
  std::vector<int> descriptors{};  // of files that the caller has opened, by path; empty: open the paths
};

struct Stats {
  u64 reads = 0;        // Read objects completed; not those that were cancelled
  u64 requests = 0;     // requests to the kernel, after merging
  u64 bytes_asked = 0;  // sum of Read::bytes
  u64 bytes_read = 0;   // bytes that the device was asked for (aligned extents)
  u64 errors = 0;       // reads completed with an error
  u64 retries = 0;      // short reads continued, EINTR/EAGAIN repeated, failed merges read one by one
  u64 busy_ns = 0;      // time with at least one request in flight
  u64 latency_ns = 0;   // sum over requests, submission to completion
  u32 depth_max = 0;    // most requests ever in flight
  u32 threads = 0;      // that read now
  u32 in_flight = 0;    // now
};

// A fault for tests: reads of `file` that touch `offset` complete with `error`, `times` times. EINTR and
// EAGAIN are met by the request, as if from the kernel: they are repeated within the bound on retries.
struct Fault {
  u32 file;
  u64 offset;
  int error;
  u32 times;
};

class Engine {
 public:
  virtual ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Sorts the reads, queues the batch and returns; never waits for I/O. The first reads of a large batch are issued
  // while the others are sorted. Throws std::runtime_error after a
  // fork or close, std::invalid_argument for a read that the engine cannot hold (nothing is read then).
  void submit(std::shared_ptr<Batch> batch);

  // Reads of the batch that are not yet issued complete now, in this thread, with ECANCELED; those in
  // flight complete as usual.
  void cancel(Batch& batch);

  // Waits for a batch that was submitted. Calls `check` ten times a second, which may throw: what is not issued
  // is cancelled then, what is in flight waited for, and the exception goes on.
  void wait(Batch& batch, const std::function<void()>& check);

  // A hint: reads will land in this memory (the cache's lines). Registered with the kernel until it is forgotten
  // or the engine closes, where that pays and is allowed (note() tells): all of it is then resident. The engine
  // keeps `owner` for as long, and only then: at a stale address the kernel would still write into the old memory.
  virtual void register_memory(std::byte* base, size_t bytes, std::shared_ptr<void> owner) {
    (void)base, (void)bytes, (void)owner;
  }

  // Ends that for memory that was registered, and is no longer read into. The engine's threads give up `owner`
  // soon after. Does nothing in a forked child.
  virtual void forget_memory(const std::byte* base, size_t bytes) { (void)base, (void)bytes; }

  // Completes what was submitted, then stops the threads and closes the files. Idempotent. Does nothing
  // in a forked child. Not for use inside Batch::done.
  void close();

  const std::string& name() const { return name_; }
  std::string note() const;                     // what the probe found, for a log line
  u32 alignment() const { return alignment_; }  // of offsets, lengths and buffers, in bytes; see Read
  u32 depth() const { return options_.depth; }  // requests that can be in flight
  u32 file_count() const { return file_count_; }
  u32 max_read_bytes() const { return options_.max_read_bytes; }
  u64 bounce_bytes() const { return bounce_bytes_; }  // memory of the bounce pool
  Stats stats() const;
  LatencyHistogram::Counts latencies() const;     // requests by the time they took
  void inject_faults(std::vector<Fault> faults);  // replaces those injected before

 protected:
  Engine(std::string name, const std::vector<std::string>& paths, const Options& options);

  // --- For the threads of an implementation (uring.cpp, pool.cpp) ---
  // Starts one thread per body. Returns when each has called its argument once: with nullptr when it is
  // ready, or with what it failed of, which is thrown here after all have ended.
  using Ready = std::function<void(std::exception_ptr)>;
  void start(std::vector<std::function<void(const Ready&)>> bodies);
  // Starts one more thread, from one of them; not while the engine closes.
  void start_another(std::function<void()> body);
  // Fills requests from the queue, merging neighbors; returns how many. With `wait`, first sleeps until
  // there is work, the engine closes, or chores_ differs from `chores`.
  u32 take(std::span<Request*> into, bool wait, u64 chores = 0);
  // Sleeps until f() or the engine closes, for which chores_ must change. False when it closes.
  template <class F>
  bool rest_until(const F& f) {
    std::unique_lock lock(queue_mutex_);
    queue_cv_.wait(lock, [&] { return closing_ || f(); });
    return !closing_;
  }
  // True when the engine is closing and every read has been issued.
  bool drained() const;
  // The kernel answered `result` (bytes or -errno). False: the request goes on and must be issued again.
  bool advance(Request& request, i64 result, Stats& tally);
  // Copies what was bounced, calls Batch::done for each read; requeues the reads of a failed merge.
  void settle(Request& request, Stats& tally);
  // Adds the tally, then lets the batches of the settled requests finish: so statistics include them.
  void finish(std::span<Request* const> settled, const Stats& tally);
  void add_note(const std::string& text);
  virtual u32 threads_in_use() const { return options_.threads; }
  // Called with each submission, under the queue mutex: for threads that wait elsewhere than in take().
  virtual void ring_doorbells() {}

  Options options_;
  std::vector<File> files_;
  u32 alignment_ = 1;         // of offsets and lengths, at least that of buffers
  u32 memory_alignment_ = 1;  // of buffers
  u32 slot_bytes_ = 0;        // one bounce slot holds the enclosing aligned extent of the largest read
  u64 bounce_bytes_ = 0;
  mutable std::mutex queue_mutex_;
  std::condition_variable queue_cv_;
  u64 chores_ = 0;  // counts what an idle thread must wake for besides reads; guarded by queue_mutex_
  const pid_t pid_;

 private:
  struct Pending {  // a read of a failed merge, to be read alone
    Batch* batch;
    u32 index;
  };
  std::unique_lock<std::mutex> lock_stats() const;
  void queue(Batch& batch, std::span<const Batch::Run> parts);
  bool next(Request& request);
  bool aligned(const Read& read) const;
  int fault(const Request& request);
  int fault(const Read& read);
  int fault(u32 file, u64 begin, u64 end, bool transient);

  const std::string name_;
  const u32 file_count_;
  std::deque<Batch*> queue_;   // batches with reads not yet issued; guarded by queue_mutex_
  std::deque<Pending> again_;  // guarded by queue_mutex_
  u32 submitting_ = 0;         // batches of which parts are still being sorted; guarded by queue_mutex_
  bool closing_ = false;       // guarded by queue_mutex_
  std::mutex close_mutex_;
  std::vector<std::thread> threads_;

  mutable std::mutex stats_mutex_;
  Stats stats_;                 // guarded by stats_mutex_
  LatencyHistogram latencies_;  // guarded by stats_mutex_
  u32 in_flight_ = 0;           // guarded by stats_mutex_
  u64 busy_since_ns_ = 0;       // guarded by stats_mutex_
  std::string note_;            // guarded by stats_mutex_

  std::mutex fault_mutex_;
  std::vector<Fault> faults_;  // guarded by fault_mutex_
  std::atomic<bool> faulty_{false};

  friend std::shared_ptr<Engine> open_engine(const std::string&, const std::vector<std::string>&, const Options&);
};

// kind: "auto" (uring, else threads), "uring", "threads", "mmap". Opens every path read-only, close-on-exec.
// Throws std::system_error whose text names the file and the cure. In a forked child the engine is leaked,
// never destroyed: its threads do not exist there.
std::shared_ptr<Engine> open_engine(const std::string& kind, const std::vector<std::string>& paths,
                                    const Options& options);

// Empty when io_uring can be used here, else why not.
std::string why_no_uring();

}  // namespace gids::io
