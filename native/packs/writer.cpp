#include "packs/writer.h"

#include <algorithm>
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

Writer::Writer(const std::vector<int>& fds, u32 threads, u32 buffers, size_t buffer_bytes)
    : buffer_bytes_(align_up(buffer_bytes, 4096)),
      buffers_(buffers),
      memory_(buffers_ * buffer_bytes_),
      jobs_(buffers) {
  for (u32 i = buffers; i-- > 0;) free_.push_back(memory_.data() + i * buffer_bytes_);
  try {
    fds_.reserve(fds.size());
    for (const int fd : fds) fds_.push_back(duplicate(fd));
    for (u32 i = 0; i < threads; ++i) threads_.push_back(io::start_thread("gids-write", [this] { serve(); }));
  } catch (...) {
    end();
    throw;
  }
}

Writer::~Writer() { end(); }

void Writer::end() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  job_cv_.notify_all();
  for (std::thread& t : threads_) t.join();
  for (const int fd : fds_) close(fd);
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

u32 Writer::failed_file() const {
  std::lock_guard lock(mutex_);
  return failed_file_;
}

u64 Writer::bytes_written() const {
  std::lock_guard lock(mutex_);
  return bytes_written_;
}

int Writer::write_all(const Job& job, u32& file) const {
  const Stripes stripes{static_cast<u32>(fds_.size())};
  for (size_t done = 0; done < job.bytes;) {
    const Stripes::Place place = stripes.at(job.offset + done);
    file = place.file;
    const ssize_t n = pwrite(fds_[file], job.buffer + done, std::min<u64>(job.bytes - done, place.room),
                             static_cast<off_t>(place.offset));
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
    u32 file = 0;
    if (!error) {
      lock.unlock();
      error = write_all(job, file);
      lock.lock();
    }
    if (!error) {
      bytes_written_ += job.bytes;
    } else if (!error_) {
      error_ = error;
      failed_file_ = file;
    }
    free_.push_back(job.buffer);
    free_cv_.notify_one();
    if (--writing_ == 0 && !job_count_) idle_cv_.notify_all();
  }
}

}  // namespace gids::packs
