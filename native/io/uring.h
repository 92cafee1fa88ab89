// The engine `uring`: each thread owns an io_uring and keeps it full. Called by open_engine.
#pragma once

#include <span>

#include "io/bounce.h"
#include "io/engine.h"

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

  const std::shared_ptr<BouncePool> bounce_;
  std::vector<std::unique_ptr<Doorbell>> doorbells_;  // one per thread, gone when it ends; guarded by queue_mutex_
  std::vector<Chunk> chunks_;                         // by index; guarded by queue_mutex_
};

}  // namespace gids::io
