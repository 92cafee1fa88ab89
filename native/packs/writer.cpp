#include "packs/writer.h"

#include <cerrno>
#include <system_error>

#include <fcntl.h>
#include <unistd.h>

#include "io/start_thread.h"

namespace gids::packs {
namespace {

int duplicate(int fd) {
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) throw std::system_error(errno, std::generic_category(), "cannot duplicate a descriptor");
  return copy;
}

}  // namespace

Writer::Writer(int fd, u32 threads, u32 buffers, size_t buffer_bytes)
    : fd_(duplicate(fd)),
      buffer_bytes_(align_up(buffer_bytes, 4096)),
      buffers_(buffers),
      memory_(buffers_ * buffer_bytes_),
      jobs_(buffers) {
  for (u32 i = buffers; i-- > 0;) free_.push_back(memory_.data() + i * buffer_bytes_);
  try {
    for (u32 i = 0; i < threads; ++i) threads_.push_back(io::start_thread("gids-write", [this] { serve(); }));
  } catch (...) {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    job_cv_.notify_all();
    for (std::thread& t : threads_) t.join();
    close(fd_);
    throw;
  }
}

Writer::~Writer() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  job_cv_.notify_all();
  for (std::thread& t : threads_) t.join();
  close(fd_);
}

std::byte* Writer::take() {
  std::unique_lock lock(mutex_);
  free_cv_.wait(lock, [&] { return !free_.empty(); });
  std::byte* const buffer = free_.back();
  free_.pop_back();
  return buffer;
}

void Writer::give_back(std::byte* buffer) {
  {
    std::lock_guard lock(mutex_);
    free_.push_back(buffer);
  }
  free_cv_.notify_one();
}

void Writer::write(std::byte* buffer, size_t bytes, u64 offset) {
  {
    std::lock_guard lock(mutex_);
    jobs_[(first_job_ + job_count_++) % buffers_] = {buffer, bytes, offset};
  }
  job_cv_.notify_one();
}

void Writer::abandon() {
  std::lock_guard lock(mutex_);
  if (!error_) error_ = ECANCELED;
}

int Writer::finish() {
  std::unique_lock lock(mutex_);
  idle_cv_.wait(lock, [&] { return job_count_ == 0 && writing_ == 0; });
  return std::exchange(error_, 0);
}

int Writer::error() const {
  std::lock_guard lock(mutex_);
  return error_;
}

u64 Writer::bytes_written() const {
  std::lock_guard lock(mutex_);
  return bytes_written_;
}

int Writer::write_all(const Job& job) const {
  for (size_t done = 0; done < job.bytes;) {
    const ssize_t n = pwrite(fd_, job.buffer + done, job.bytes - done, static_cast<off_t>(job.offset + done));
    if (n > 0) done += static_cast<size_t>(n);
    else if (n == 0) return ENOSPC;
    else if (errno != EINTR) return errno;
  }
  return 0;
}

void Writer::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    job_cv_.wait(lock, [&] { return stop_ || job_count_; });
    if (!job_count_) return;
    const Job job = jobs_[first_job_];
    first_job_ = (first_job_ + 1) % buffers_;
    --job_count_;
    ++writing_;
    int error = error_;
    if (!error) {
      lock.unlock();
      error = write_all(job);
      lock.lock();
    }
    if (!error) bytes_written_ += job.bytes;
    else if (!error_) error_ = error;
    free_.push_back(job.buffer);
    free_cv_.notify_one();
    if (--writing_ == 0 && !job_count_) idle_cv_.notify_all();
  }
}

}  // namespace gids::packs
