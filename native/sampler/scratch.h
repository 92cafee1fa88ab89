// Memory that grows and is used again: what a sampler needs while it makes a minibatch.
#pragma once

#include <algorithm>
#include <cstring>

#include "cache/memory.h"

namespace gids::sampler {

template <class T>
class Scratch {
 public:
  // Room for at least `count`; the first `keep` values stay.
  T* ensure(size_t count, size_t keep = 0) {
    if (count > memory_.size()) {
      HugeArray<T> larger(std::max<size_t>({count, memory_.size() + memory_.size() / 2, 4096 / sizeof(T)}));
      if (keep) std::memcpy(larger.data(), memory_.data(), keep * sizeof(T));
      memory_ = std::move(larger);
    }
    return memory_.data();
  }
  T* data() { return memory_.data(); }
  const T* data() const { return memory_.data(); }
  size_t bytes() const { return memory_.bytes(); }

 private:
  HugeArray<T> memory_;
};

}  // namespace gids::sampler
