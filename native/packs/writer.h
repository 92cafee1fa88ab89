// Writes large aligned buffers to a scratch file, several at a time. Called by the sweep, whose buffers it owns and
// recycles. Knows descriptors and offsets; the I/O engines only read.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

#include "cache/memory.h"
#include "packs/stripes.h"

namespace gids::packs {

class Writer {
 public:
  // fds: one or more files, open for writing, that the scratch file is striped over; the writer keeps duplicates.
  // Throws std::system_error.
  Writer(const std::vector<int>& fds, u32 threads, u32 buffers, size_t buffer_bytes);
  ~Writer();  // writes what was given
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  size_t buffer_bytes() const { return buffer_bytes_; }
  u32 buffer_count() const { return buffers_; }

  // A free buffer, aligned to a memory page. Waits for one; there is one again as soon as a write ends.
  std::byte* take();
  // Writes the first `bytes` of a taken buffer at `offset`, later. Does not throw. Then the buffer is free. After an
  // error nothing more is written.
  void write(std::byte* buffer, size_t bytes, u64 offset);
  void give_back(std::byte* buffer);  // without writing it

  // What waits is not written, and nothing more is; finish() then returns ECANCELED. Returns at once.
  void abandon();
  // Waits until all is written. Returns the first error, an errno, or 0; and forgets it.
  int finish();
  int error() const;
  u32 failed_file() const;  // that the first error is of; 0 without one
  u64 bytes_written() const;

 private:
  struct Job {
    std::byte* buffer;
    size_t bytes;
    u64 offset;
  };
  void serve();
  // An errno, or 0. Sets file to the one that failed.
  int write_all(const Job& job, u32& file) const;
  void end();

  std::vector<int> fds_;
  const size_t buffer_bytes_;
  const u32 buffers_;
  HugeArray<std::byte> memory_;
  mutable std::mutex mutex_;
  std::condition_variable free_cv_, job_cv_, idle_cv_;
  std::vector<std::byte*> free_;
  std::vector<Job> jobs_;  // a ring, with room for all buffers: write() does not allocate
  u32 first_job_ = 0, job_count_ = 0;
  u32 writing_ = 0;
  u64 bytes_written_ = 0;
  int error_ = 0;
  u32 failed_file_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace gids::packs
