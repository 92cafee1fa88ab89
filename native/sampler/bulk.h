// Many minibatches in one call. A thread makes whole minibatches, one after the other, with memory of its own: threads
// wait for nobody, and what a minibatch is made in stays in their caches. Called by the bindings; knows nothing of how
// one is drawn.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "sampler/labor.h"
#include "sampler/ladies.h"

namespace gids::sampler {

// What one minibatch at a time is made with.
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

  // Makes minibatch i. What it makes depends on i alone, so that all of these are the same.
  using Make = std::function<Minibatch(Samplers&, size_t i)>;

  // make(samplers, i) for i in [0, count). Few minibatches for the threads: all threads make one after the other.
  // Throws what the first one that fails throws: out_of_range, BadTopology and length_error with "step N: " before the
  // message, N = first_step + i, where there are several. One caller at a time.
  std::vector<Minibatch> make(size_t count, u64 first_step, const Make& make);

  // What is kept between calls: scratch memory, of all threads and of those that make one minibatch together; and
  // buffers, of minibatches that are in use and of those that are not.
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
