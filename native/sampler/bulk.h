// Makes many minibatches in one call. Each thread makes whole minibatches with its own memory: threads do not wait for
// each other, and the memory stays in their caches. Called by the bindings; knows nothing of how edges are drawn.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "sampler/labor.h"
#include "sampler/ladies.h"

namespace gids::sampler {

// The state for one minibatch at a time.
struct Samplers {
  Samplers(u32 threads, std::shared_ptr<cache::BufferPool> pool) : host(threads, std::move(pool)) {}
  HostSampler host;
  Labor labor;
  Ladies ladies;
  size_t bytes() const { return host.bytes() + labor.bytes() + ladies.bytes(); }
};

class Bulk {
 public:
  // keep_bytes: of the pool of buffers, which all threads share.
  Bulk(u32 threads, size_t keep_bytes);

  // Makes minibatch i. The result depends on i only.
  using Make = std::function<Minibatch(Samplers&, size_t i)>;

  // Calls make(samplers, i) for i in [0, count). With few minibatches per thread, all threads together make one after
  // the other. Throws the error of the first one that fails; with several minibatches, the message of out_of_range,
  // BadTopology and length_error begins with "step N: ", N = first_step + i. One caller at a time.
  std::vector<Minibatch> make(size_t count, u64 first_step, const Make& make);

  // Memory kept between calls: scratch (of all threads, and of those that make one minibatch together) and buffers
  // of minibatches (in use, and idle).
  size_t scratch_bytes() const;
  size_t together_bytes() const { return together_.bytes(); }
  size_t taken_bytes() const { return pool_->taken_bytes(); }
  size_t idle_bytes() const { return pool_->idle_bytes(); }

 private:
  std::vector<Minibatch> make_apart(size_t count, u64 first_step, const Make& make);

  std::shared_ptr<cache::BufferPool> pool_;
  Samplers together_;                             // with all threads
  std::vector<std::unique_ptr<Samplers>> apart_;  // by thread; null until it is needed
};

}  // namespace gids::sampler
