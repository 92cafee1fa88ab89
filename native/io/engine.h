// The I/O engine: reads pieces of shard files into memory, out of order, with bounded depth.
// Called by the cache (page fills) and by bind/ (Python). Knows files, offsets and buffers; knows
// nothing of tables, pages or minibatches.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gids/target.h"

namespace gids::io {

// One contiguous piece of one file. `dest == nullptr` asks for a bounce buffer of the engine's: the
// bytes are then only valid inside Batch::done.
struct Read {
  u64 offset;
  std::byte* dest;
  u32 bytes;
  u32 file;
  u64 cookie;  // the caller's own; the engine hands it back untouched
};
static_assert(sizeof(Read) == 32);

// A set of reads submitted together, and the sink of their completions. Kept alive by the engine
// until the last completion; several batches are in flight at once.
class Batch {
 public:
  virtual ~Batch() = default;

  // Called once per read, from an engine thread, in any order, possibly from several threads at once.
  // error: 0, or a positive errno (ENODATA: the file ended early). Must not block and must not throw.
  virtual void done(const Read& read, const std::byte* data, int error) noexcept = 0;

  // Waits until every read is done. False when `timeout_ms` passed first.
  bool wait_for(u32 timeout_ms);
  bool finished() const { return left_.load(std::memory_order_acquire) == 0; }

  std::vector<Read> reads;  // sorted by (file, offset) at submission; fixed from then on

 private:
  friend class Engine;
  std::atomic<u64> left_{0};
  std::mutex mutex_;
  std::condition_variable cv_;
  size_t next_ = 0;           // first read not yet issued; guarded by the engine's queue mutex
};

struct Options {
  u32 depth = 256;             // requests in flight
  u32 threads = 0;             // 0: one ring thread (uring), 32 readers (threads)
  u32 max_read_bytes = 1u << 20;   // largest Read::bytes that will be submitted
  u32 max_merge_bytes = 1u << 17;  // neighbouring reads are merged up to this size; 0: never
  bool direct = true;          // O_DIRECT
};

struct Stats {
  u64 reads = 0;               // Read objects completed
  u64 requests = 0;            // requests to the kernel, after merging
  u64 bytes_asked = 0;         // sum of Read::bytes
  u64 bytes_read = 0;          // bytes that the device was asked for (aligned extents)
  u64 errors = 0;
  u64 retries = 0;             // short reads continued, EINTR/EAGAIN repeated
  u64 busy_ns = 0;             // time with at least one request in flight
  u64 latency_ns = 0;          // sum over requests, submission to completion
  u32 depth_max = 0;           // most requests ever in flight
};

// A fault for tests: reads of `file` that touch `offset` complete with `error`, `times` times.
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

  // Queues the batch and returns; never waits for I/O. Throws std::runtime_error after a fork or close.
  void submit(std::shared_ptr<Batch> batch);

  // A hint: reads will land in this memory (the cache's lines). Kept registered while the engine lives
  // where that pays and is allowed.
  virtual void register_memory(std::byte* base, size_t bytes) { (void)base, (void)bytes; }

  // Completes what was submitted, then stops the threads and closes the files. Idempotent.
  void close();

  const std::string& name() const { return name_; }
  const std::string& note() const { return note_; }    // what the probe found, for a log line
  u32 alignment() const { return alignment_; }         // of offsets, lengths and buffers, in bytes
  u32 depth() const { return options_.depth; }
  u64 bounce_bytes() const { return bounce_bytes_; }   // memory of the bounce pool
  Stats stats() const;
  void inject_faults(std::vector<Fault> faults);
};

// kind: "auto" (uring, else threads), "uring", "threads", "mmap". Opens every path read-only, close-on-exec.
// Throws std::system_error whose text names the file and the cure.
std::shared_ptr<Engine> open_engine(const std::string& kind, const std::vector<std::string>& paths,
                                    const Options& options);

}  // namespace gids::io
