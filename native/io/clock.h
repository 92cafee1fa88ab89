// The monotonic clock of statistics. Called by the engines.
#pragma once

#include <chrono>

#include "gids/target.h"

namespace gids::io {

inline u64 now_ns() {
  using namespace std::chrono;
  return static_cast<u64>(duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count());
}

}  // namespace gids::io
