// The engines `threads` and `mmap`: a pool of threads that each read one request at a time. Called by
// open_engine.
#pragma once

#include "io/bounce.h"
#include "io/engine.h"

namespace gids::io {

class PoolEngine final : public Engine {
 public:
  enum class Kind { threads, mmap };
  PoolEngine(Kind kind, const std::vector<std::string>& paths, Options options);

 private:
  static Options settle_options(Kind kind, Options options);
  void serve(std::byte* slot);

  const Kind kind_;
  BouncePool bounce_;
};

}  // namespace gids::io
