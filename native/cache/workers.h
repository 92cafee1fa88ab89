// A few threads for one job at a time: parallel copying of rows. The caller works too; with one thread
// there are no others. Called by the PageCaches that share them; knows nothing of rows.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "gids/target.h"
#include "store/mapped_file.h"

namespace gids::cache {

class Workers {
 public:
  explicit Workers(u32 threads);  // std::system_error when there cannot be so many
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Calls f(begin, end, worker) over [0, n) in pieces of `grain`; worker < threads(). Returns when all are
  // done. f must not throw, and reads mapped files under the caller's guard. Any thread; a second caller waits for the
  // first one's job.
  void parallel_for(size_t n, size_t grain, const std::function<void(size_t, size_t, u32)>& f);
  u32 threads() const { return static_cast<u32>(others_.size()) + 1; }

 private:
  void work(u32 worker);
  void run_pieces(u32 worker);
  void stop();

  std::vector<std::thread> others_;
  std::mutex job_mutex_;  // held for the whole of a job
  std::mutex mutex_;
  std::condition_variable start_, end_;
  const std::function<void(size_t, size_t, u32)>* job_ = nullptr;
  store::MapGuard* guard_ = nullptr;  // of the caller
  size_t n_ = 0, grain_ = 1;
  std::atomic<size_t> next_{0};
  u64 round_ = 0;
  u32 running_ = 0;
  bool stop_ = false;
};

}  // namespace gids::cache
