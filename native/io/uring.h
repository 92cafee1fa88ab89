// The engine `uring`: each thread owns an io_uring and keeps it full. Their number follows the load. Called by
// open_engine.
#pragma once

#include <span>

#include "io/bounce.h"
#include "io/engine.h"
#include "io/ring_count.h"

namespace gids::io {

class Ring;

// Wakes a ring thread that waits for completions although it could take more reads: without it a new batch
// would wait for the slowest read of the one before.
struct Doorbell {
  Doorbell();
  ~Doorbell();
  Doorbell(const Doorbell&) = delete;
  void ring();   // wakes the thread if it is hungry
  void clear();  // takes the ringing back

  int fd;  // an eventfd that the thread's ring polls
  std::atomic<bool> hungry{false};
};

// What the threads of the rings tell each other.
struct Seat {
  Doorbell doorbell;
  alignas(64) std::atomic<u64> cpu_ns{0};  // of the ring's thread
  std::atomic<bool> idle{false};           // it found fewer reads than it had room for
};

class UringEngine final : public Engine {
 public:
  UringEngine(const std::vector<std::string>& paths, Options options);
  void register_memory(std::byte* base, size_t bytes, std::shared_ptr<void> owner) override;
  void forget_memory(const std::byte* base, size_t bytes) override;

 private:
  struct Chunk {      // memory to be registered with the kernel under one index
    std::byte* base;  // null: the index is free
    u64 bytes;
    std::weak_ptr<void> owner;  // each ring that has registered it keeps it
    u64 changed;                // chores_ since then
  };
  class Worker;
  static Options settle_options(Options options);
  void ring_doorbells() override;
  u32 threads_in_use() const override { return in_use_; }
  u32 extra_rings() const;
  void run(u32 ring, Seat& seat, const Ready& ready);
  void follow_load(u64 now);
  void use(u32 rings);

  static constexpr u32 extra_depth = 64;  // requests of a ring that follows the load

  const std::shared_ptr<BouncePool> bounce_;
  std::vector<std::unique_ptr<Seat>> seats_;  // one per thread, gone when it ends; guarded by queue_mutex_
  std::vector<Chunk> chunks_;                 // by index; guarded by queue_mutex_
  std::atomic<u32> in_use_;                   // rings; those from here on rest
  std::atomic<bool> refused_{false};          // the system gave no further ring

  // Of the first ring's thread:
  RingCount wanted_;
  u64 looked_ns_ = 0, process_ns_ = 0, requests_ = 0;  // at the last look
  std::vector<u64> cpu_ns_;                            // the same, of each ring's thread
};

}  // namespace gids::io
