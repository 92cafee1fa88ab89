#include "io/file.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

namespace gids::io {
namespace {

constexpr u32 alignment_max = 1u << 16;
constexpr u32 btrfs = 0x9123683E, overlay = 0x794C7630;

std::system_error error(int code, const std::string& text) { return {code, std::generic_category(), text}; }

[[noreturn]] void refuse_direct(int fd, const std::string& path) {
  throw error(EINVAL,
              path + ": the " + file_system_name(fd) +
                  " file system refuses direct I/O (O_DIRECT) here; open with tuning=gids.Tuning(direct=False), or "
                  "move the file to a file system that has it, such as xfs, or ext4 without data=journal and "
                  "encryption");
}

// struct statx as of Linux 6.14, because older system headers lack the last fields.
struct Statx {
  u32 mask, blksize;
  u64 attributes;
  u32 nlink, uid, gid;
  u16 mode, pad;
  u64 ino, size, blocks, attributes_mask;
  std::array<u64, 8> times;
  u32 rdev_major, rdev_minor, dev_major, dev_minor;
  u64 mnt_id;
  u32 dio_mem_align, dio_offset_align;
  u64 subvolume;
  std::array<u32, 3> atomic_writes;
  u32 dio_read_offset_align;  // 0: as dio_offset_align
  std::array<u64, 9> spare;
};
static_assert(sizeof(Statx) == 256, "the kernel writes 256 bytes");
constexpr u32 statx_dio_align = 0x2000, statx_dio_read_align = 0x20000;

struct Alignment {
  u32 offset, memory;  // 0: no direct I/O on this file
};

// What the kernel says of the file; nothing before Linux 6.1 and on some file systems.
std::optional<Alignment> stated_alignment(int fd) {
  Statx s{};
  const u32 asked = statx_dio_align | statx_dio_read_align;
  if (syscall(__NR_statx, fd, "", AT_EMPTY_PATH, asked, &s) != 0 || !(s.mask & statx_dio_align)) return {};
  // Writes to blocks that files share, as XFS's copies do, must be longer than reads.
  return Alignment{s.dio_read_offset_align ? s.dio_read_offset_align : s.dio_offset_align, s.dio_mem_align};
}

// The least power of two from 512 with which a direct read is not refused; on Btrfs, which reads through the page cache
// what is not aligned to its blocks, and on an overlay, which may be one of Btrfs, the size of these.
Alignment probed_alignment(int fd) {
  struct statfs s{};
  const u32 type = fstatfs(fd, &s) == 0 ? static_cast<u32>(s.f_type) : 0;
  const bool in_blocks = type == btrfs || type == overlay;
  const u32 least = in_blocks ? std::clamp(static_cast<u32>(s.f_bsize), 512u, alignment_max) : 512;
  const off_t data = std::max<off_t>(0, lseek(fd, 0, SEEK_DATA));  // a read of a hole is never refused
  std::unique_ptr<void, decltype(&std::free)> buffer(std::aligned_alloc(alignment_max, 2 * alignment_max), &std::free);
  for (u32 a = least; a <= alignment_max; a *= 2) {
    // Memory that is aligned to `a` and to nothing more, so that a success speaks for it.
    char* odd = static_cast<char*>(buffer.get()) + a;
    if (pread(fd, odd, a, data / a * a) >= 0) return {a, a};
    if (errno != EINVAL) break;
  }
  return {0, 0};
}

}  // namespace

std::string file_system_name(int fd) {
  struct Name {
    u32 magic;
    const char* name;
  };
  static constexpr Name names[] = {
      {0xEF53, "ext4"},         {0x58465342, "xfs"},      {btrfs, "btrfs"},         {0x01021994, "tmpfs"},
      {overlay, "overlay"},     {0x6969, "nfs"},          {0x65735546, "fuse"},  {0x2FC12FC1, "zfs"},
      {0x9FA0, "proc"},         {0x62656572, "sysfs"},    {0xF2F52010, "f2fs"},  {0x01021997, "9p"},
      {0xFF534D42, "cifs"},     {0x858458F6, "ramfs"},    {0x00C36400, "ceph"},  {0x0BD00BD0, "lustre"},
      {0x73717368, "squashfs"}, {0xCA451A4E, "bcachefs"}, {0xFE534D42, "smb2"},  {0x47504653, "gpfs"},
  };
  struct statfs s{};
  if (fstatfs(fd, &s) != 0) return "unknown";
  for (const Name& n : names)
    if (n.magic == static_cast<u32>(s.f_type)) return n.name;
  char text[16];
  std::snprintf(text, sizeof text, "0x%x", static_cast<u32>(s.f_type));
  return text;
}

File::File(const std::string& path, bool direct, int opened) : path_(path) {
  fd_ = opened < 0 ? open(path.c_str(), O_RDONLY | O_CLOEXEC) : fcntl(opened, F_DUPFD_CLOEXEC, 0);
  if (fd_ < 0) throw error(errno, "cannot open " + path + " for reading");
  try {
    struct stat s{};
    if (fstat(fd_, &s) != 0) throw error(errno, "cannot stat " + path);
    if (!S_ISREG(s.st_mode) && !S_ISBLK(s.st_mode))
      throw error(EINVAL, path + " is neither a regular file nor a block device");
    if (!direct) return;
    if (fcntl(fd_, F_SETFL, O_RDONLY | O_DIRECT) != 0) refuse_direct(fd_, path);
    const std::optional<Alignment> stated = stated_alignment(fd_);
    const Alignment alignment = stated ? *stated : probed_alignment(fd_);
    if (alignment.offset == 0) refuse_direct(fd_, path);
    alignment_ = alignment.offset;
    memory_alignment_ = std::max(1u, alignment.memory);
  } catch (...) {
    ::close(fd_);
    throw;
  }
}

File::~File() {
  if (map_) munmap(map_, map_bytes_);
  if (fd_ >= 0) ::close(fd_);
}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      alignment_(other.alignment_),
      memory_alignment_(other.memory_alignment_),
      map_(std::exchange(other.map_, nullptr)),
      map_bytes_(other.map_bytes_) {}

void File::map() {
  struct stat s{};
  if (fstat(fd_, &s) != 0) throw error(errno, "cannot stat " + path_);
  if (s.st_size == 0) return;
  // Private: FUSE may refuse other maps. Nothing is written, so no page is copied.
  void* m = mmap(nullptr, static_cast<size_t>(s.st_size), PROT_READ, MAP_PRIVATE, fd_, 0);
  if (m == MAP_FAILED) throw error(errno, "cannot map " + path_);
  map_ = static_cast<std::byte*>(m);
  map_bytes_ = static_cast<u64>(s.st_size);
  madvise(map_, map_bytes_, MADV_DONTFORK);
}

i64 File::read(const iovec* iov, int count, u64 offset) const {
  ssize_t n = preadv(fd_, iov, count, static_cast<off_t>(offset));
  return n >= 0 ? n : -errno;
}

i64 File::copy(const iovec* iov, int count, u64 offset) const {
  struct stat s{};
  if (fstat(fd_, &s) != 0) return -errno;
  const u64 end = std::min(map_bytes_, static_cast<u64>(s.st_size));
  u64 at = offset;
  for (int i = 0; i < count && at < end; ++i) {
    const u64 n = std::min<u64>(iov[i].iov_len, end - at);
    std::memcpy(iov[i].iov_base, map_ + at, n);
    at += n;
  }
  return static_cast<i64>(at - offset);
}

}  // namespace gids::io
