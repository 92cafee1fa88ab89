#include "cache/workers.h"

#include <algorithm>

#include "io/start_thread.h"

namespace gids::cache {

Workers::Workers(u32 threads) {
  others_.reserve(threads);
  try {
    for (u32 i = 1; i < threads; ++i) others_.push_back(io::start_thread("gids-copy", [this, i] { work(i); }));
  } catch (...) {
    stop();
    throw;
  }
}

Workers::~Workers() { stop(); }

void Workers::stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (auto& t : others_) t.join();
}

void Workers::run_pieces(u32 worker) {
  for (;;) {
    const size_t begin = next_.fetch_add(grain_, std::memory_order_relaxed);
    if (begin >= n_) return;
    (*job_)(begin, std::min(n_, begin + grain_), worker);
  }
}

void Workers::work(u32 worker) {
  u64 seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    start_.wait(lock, [&] { return stop_ || round_ != seen; });
    if (stop_) return;
    seen = round_;
    store::MapGuard* const guard = guard_;
    lock.unlock();
    {
      const store::MapGuard::Join join(guard);
      run_pieces(worker);
    }
    lock.lock();
    if (--running_ == 0) end_.notify_one();
  }
}

void Workers::parallel_for(size_t n, size_t grain, const std::function<void(size_t, size_t, u32)>& f) {
  if (others_.empty() || n <= grain) {  // not worth waking anyone
    if (n) f(0, n, 0);
    return;
  }
  std::lock_guard job(job_mutex_);
  std::unique_lock lock(mutex_);
  job_ = &f;
  guard_ = store::MapGuard::current();
  n_ = n;
  grain_ = grain;
  next_.store(0, std::memory_order_relaxed);
  running_ = static_cast<u32>(others_.size());
  ++round_;
  lock.unlock();
  start_.notify_all();
  run_pieces(0);
  lock.lock();
  end_.wait(lock, [&] { return running_ == 0; });
}

}  // namespace gids::cache
