// The service thread of the request queue: the host's end of the queue pair of gids/request_queue.h. It plays the NVMe
// controller: takes rounds, has an Engine read their pages into staging, and answers.
// Called by the owner of the queue (the GPU cache, or a test), which lends it the pair's memory. Makes no CUDA
// call and takes no GIL; knows files and pages, and nothing of lines, steps or kernels.
//
// Life:  construct -> arm() before each kernel that posts -> ... -> close()
// * the thread sleeps (on an eventfd) while every armed round is answered; from arm() until then it polls, backing off
//   to 50 us when there is nothing to do.
// * every request that is taken gets one error or none: from its read, the time-out, or close(). A round is answered
//   when all its requests are, after the rounds before it.
// * after close() every answer is queue::closed: every waiter is released, and all requests of rounds that were not
//   copied count as canceled. The service closes by itself when a poster gave up waiting: then the queue is broken.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <sys/types.h>

#include "gids/request_queue.h"
#include "io/engine.h"

namespace gids::io {

// How the pages of one table lie in the engine's files: page p is in file first_file + p % file_count, at
// p / file_count * page_bytes.
struct QueueTable {
  u64 page_count;
  u32 first_file;
  u32 file_count;
  u32 page_bytes;
  // CRC32C of each page, [page_count], or null: pages are not checked. Valid until close() returns.
  const u32* checksums = nullptr;
};

struct QueueStats {
  u64 taken = 0;      // requests
  u64 failed = 0;     // answered with an error
  u64 timed_out = 0;  // of these: no completion in time
  u64 corrupt = 0;    // of these: the page has another checksum
  u64 late = 0;       // completions that came after the answer
  u64 rounds = 0;     // answered
  u64 sleeps = 0;     // times that the thread went to sleep with nothing armed
};

class QueueService {
 public:
  // Rounds name a table by its index. The memory of the pair must be zeroed and stay valid until close() returns; of
  // the staging, `owner` is kept until the engine has ended every read, also those that were answered without it.
  // Throws std::invalid_argument for a pair, tables and an engine that do not fit each other.
  QueueService(std::shared_ptr<Engine> engine, std::vector<QueueTable> tables, const queue::Pair& pair,
               std::shared_ptr<void> owner, u32 timeout_ms = 30'000);
  ~QueueService();  // close()
  QueueService(const QueueService&) = delete;
  QueueService& operator=(const QueueService&) = delete;

  // Announces that a kernel will post a round. Returns the round's number (0, 1, 2, ...), for the kernel and for the
  // wait. A kernel that was armed must be launched. Throws std::runtime_error after close(), in a forked child, and
  // when the queue is broken.
  u64 arm();

  // Takes no more, cancels the reads that were not issued (ECANCELED), waits for those that were (each for the
  // rest of its time-out, at most), and releases every waiter. Idempotent; does nothing in a forked child.
  void close();

  QueueStats stats() const;
  bool broken() const;  // somebody gave up waiting

 private:
  class Pair;
  class Reads;
  struct Wake;

  void run();

  const pid_t pid_;
  const u64 timeout_ns_;
  std::shared_ptr<Engine> engine_;
  const std::shared_ptr<Wake> wake_;
  std::shared_ptr<Pair> pair_;
  std::atomic<u64> sleeps_{0};
  std::atomic<bool> stop_{false};
  std::mutex close_mutex_;
  std::thread thread_;
};

}  // namespace gids::io
