// A shard file, open for reading, and the requirements of its file system for direct I/O. Called by the engines.
#pragma once

#include <string>
#include <system_error>

#include <sys/uio.h>

#include "gids/target.h"

namespace gids::io {

// Owns the descriptor (close-on-exec) and, for the mmap engine, the mapping; both end with the object.
class File {
 public:
  // opened: a descriptor of the file, which is copied (its status flags are shared), or -1: open the path.
  // Throws std::system_error: the text names the file, its file system where that matters, and the cure.
  File(const std::string& path, bool direct, int opened = -1);
  ~File();
  File(File&& other) noexcept;
  File& operator=(File&&) = delete;

  void map();  // for copy(); throws std::system_error

  int fd() const { return fd_; }
  const std::string& path() const { return path_; }
  // Of direct I/O; 1 when buffered.
  u32 alignment() const { return alignment_; }                // of offsets and lengths
  u32 memory_alignment() const { return memory_alignment_; }  // of buffers; NVMe asks for no more than 4

  // preadv; bytes or -errno.
  i64 read(const iovec* iov, int count, u64 offset) const;
  // The same out of the mapping. The size is asked first: beyond the end of a file that was truncated
  // after it was mapped, touching the mapping would raise SIGBUS.
  i64 copy(const iovec* iov, int count, u64 offset) const;

 private:
  std::string path_;
  int fd_ = -1;
  u32 alignment_ = 1;
  u32 memory_alignment_ = 1;
  std::byte* map_ = nullptr;
  u64 map_bytes_ = 0;
};

// "ext4", "xfs", "tmpfs", …, or the magic number in hexadecimal.
std::string file_system_name(int fd);

}  // namespace gids::io
