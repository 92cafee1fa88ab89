// The engine `uring`: each thread owns an io_uring and keeps it full. Called by open_engine.
#pragma once

#include <span>

#include "io/bounce.h"
#include "io/engine.h"

namespace gids::io {

class Ring;

class UringEngine final : public Engine {
 public:
  UringEngine(const std::vector<std::string>& paths, Options options);
  void register_memory(std::byte* base, size_t bytes) override;

 private:
  struct Chunk {  // memory registered with the kernel under one index
    std::byte* base;
    u64 bytes;
  };
  class Worker;
  static Options settle_options(Options options);

  BouncePool bounce_;
  std::vector<Chunk> chunks_;  // in the order of their indices; guarded by queue_mutex_
};

}  // namespace gids::io
