// Sees the calls of a process that change files below one directory: counts them, logs them, and kills the
// process (SIGKILL) when it makes a given one. Preloaded (LD_PRELOAD) by kill_writers, which arms it in a
// forked child; until then every call passes through. Native code and Python are seen alike.
//
// A line of the log, its fields separated by tabs:
//   call  path  second path or offset  data in hexadecimal
// A call that failed is logged as "failed". One that the tool does not simulate is logged as "unknown".
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <pthread.h>
#include <string>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#include <vector>

namespace {

pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
std::string* root = nullptr;  // null: not armed
long kill_at = 0;
bool torn = false;
int log_fd = -1;
long calls = 0;

class Guard {
 public:
  Guard() { pthread_mutex_lock(&mutex); }
  ~Guard() { pthread_mutex_unlock(&mutex); }
};

std::string target(const std::string& link) {
  char found[PATH_MAX];
  const ssize_t size = readlink(link.c_str(), found, sizeof found);
  return size < 0 ? "" : std::string(found, static_cast<size_t>(size));
}

std::string path_of(int fd) { return target("/proc/self/fd/" + std::to_string(fd)); }

std::string path_of(int dirfd, const char* path) {
  if (!path || path[0] == '/') return path ? path : "";
  return (dirfd == AT_FDCWD ? target("/proc/self/cwd") : path_of(dirfd)) + "/" + path;
}

bool is_watched(const std::string& path) {
  return root && (path == *root || path.compare(0, root->size() + 1, *root + "/") == 0);
}

void die() {
  syscall(SYS_kill, getpid(), SIGKILL);
  for (;;) pause();
}

void log_line(const std::string& line) {
  for (size_t done = 0; done < line.size();) {
    const long written = syscall(SYS_write, log_fd, line.data() + done, line.size() - done);
    if (written < 0) die();
    done += static_cast<size_t>(written);
  }
}

void log_call(long result, const char* name, const std::string& path, const std::string& second,
              const std::string& data = "") {
  if (log_fd < 0) return;
  const int saved = errno;
  log_line((result < 0 ? "failed" : name) + ("\t" + path) + "\t" + second + "\t" + data + "\n");
  errno = saved;
}

// Counts a call; true when it is the one at which the process ends.
bool is_last() { return ++calls == kill_at; }

template <typename Call>
long change(const char* name, const std::string& path, const std::string& second, Call call) {
  Guard guard;
  if (!is_watched(path) && !is_watched(second)) return call();
  if (is_last()) die();
  const long result = call();
  log_call(result, name, path, second);
  return result;
}

long opened(int dirfd, const char* path, int flags, mode_t mode) {
  const auto call = [&] { return syscall(SYS_openat, dirfd, path, flags, mode); };
  if (!(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE) return call();
  const std::string full = path_of(dirfd, path);
  struct stat found;
  const bool exists = fstatat(AT_FDCWD, full.c_str(), &found, 0) == 0;
  if (exists && !(flags & O_TRUNC)) return call();
  return change(exists ? "truncate" : "create", full, "0", call);
}

std::string hexadecimal(const char* data, size_t size) {
  static const char digits[] = "0123456789abcdef";
  std::string text(2 * size, ' ');
  for (size_t i = 0; i < size; ++i) {
    text[2 * i] = digits[static_cast<unsigned char>(data[i]) >> 4];
    text[2 * i + 1] = digits[data[i] & 15];
  }
  return text;
}

// Offset -1: at the file's position (its end for a file that is appended to).
long written(int fd, const void* data, size_t size, off_t offset) {
  const auto call = [&](size_t part) {
    return offset < 0 ? syscall(SYS_write, fd, data, part)
                      : syscall(SYS_pwrite64, fd, data, part, offset);
  };
  Guard guard;
  const std::string path = root ? path_of(fd) : "";
  if (!is_watched(path)) return call(size);
  if (is_last()) {
    if (torn && size > 1) call(size / 2);
    die();
  }
  off_t at = offset;
  if (at < 0) {
    struct stat found;
    const int flags = static_cast<int>(syscall(SYS_fcntl, fd, F_GETFL));
    at = (flags & O_APPEND) && fstat(fd, &found) == 0 ? found.st_size : lseek(fd, 0, SEEK_CUR);
  }
  const long result = call(size);
  log_call(result, "write", path, std::to_string(at),
           hexadecimal(static_cast<const char*>(data), result < 0 ? 0 : static_cast<size_t>(result)));
  return result;
}

long gathered(int fd, const iovec* parts, int count, off_t offset) {
  std::string data;
  for (int i = 0; i < count; ++i) data.append(static_cast<const char*>(parts[i].iov_base), parts[i].iov_len);
  return written(fd, data.data(), data.size(), offset);
}

}  // namespace

extern "C" {

// Watch what is below a directory, from now on. at: the number of the call at which to end, from 1; 0: none.
// half: write half of it, where that call writes. log: or -1.
void kill_writers_arm(const char* directory, long at, int half, int log) {
  Guard guard;
  kill_at = at, torn = half, log_fd = log, calls = 0;
  root = new std::string(directory);
}

#define OPEN_MODE                  \
  mode_t mode = 0;                 \
  if (flags & (O_CREAT | O_TMPFILE)) { \
    va_list list;                  \
    va_start(list, flags);         \
    mode = va_arg(list, mode_t);   \
    va_end(list);                  \
  }

int open(const char* path, int flags, ...) {
  OPEN_MODE
  return static_cast<int>(opened(AT_FDCWD, path, flags, mode));
}
int open64(const char* path, int flags, ...) {
  OPEN_MODE
  return static_cast<int>(opened(AT_FDCWD, path, flags, mode));
}
int openat(int dirfd, const char* path, int flags, ...) {
  OPEN_MODE
  return static_cast<int>(opened(dirfd, path, flags, mode));
}
int openat64(int dirfd, const char* path, int flags, ...) {
  OPEN_MODE
  return static_cast<int>(opened(dirfd, path, flags, mode));
}
int creat(const char* path, mode_t mode) {
  return static_cast<int>(opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode));
}

int renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned flags) {
  const char* name = flags > 1 ? "unknown" : "rename";
  return static_cast<int>(change(name, path_of(from_dir, from), path_of(to_dir, to), [&]() -> long {
    return syscall(SYS_renameat2, from_dir, from, to_dir, to, flags);
  }));
}
int renameat(int from_dir, const char* from, int to_dir, const char* to) {
  return renameat2(from_dir, from, to_dir, to, 0);
}
int rename(const char* from, const char* to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }

int unlinkat(int dirfd, const char* path, int flags) {
  return static_cast<int>(change(flags & AT_REMOVEDIR ? "rmdir" : "unlink", path_of(dirfd, path), "",
                                 [&] { return syscall(SYS_unlinkat, dirfd, path, flags); }));
}
int unlink(const char* path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char* path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int dirfd, const char* path, mode_t mode) {
  return static_cast<int>(change("mkdir", path_of(dirfd, path), "",
                                 [&] { return syscall(SYS_mkdirat, dirfd, path, mode); }));
}
int mkdir(const char* path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int linkat(int from_dir, const char* from, int to_dir, const char* to, int flags) {
  return static_cast<int>(change("link", path_of(from_dir, from), path_of(to_dir, to), [&] {
    return syscall(SYS_linkat, from_dir, from, to_dir, to, flags);
  }));
}
int link(const char* from, const char* to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }
int symlinkat(const char* from, int to_dir, const char* to) {
  return static_cast<int>(change("unknown", path_of(to_dir, to), "",
                                 [&] { return syscall(SYS_symlinkat, from, to_dir, to); }));
}
int symlink(const char* from, const char* to) { return symlinkat(from, AT_FDCWD, to); }

int fsync(int fd) {
  return static_cast<int>(change("fsync", root ? path_of(fd) : "", "", [&] { return syscall(SYS_fsync, fd); }));
}
int fdatasync(int fd) {
  return static_cast<int>(
      change("fsync", root ? path_of(fd) : "", "", [&] { return syscall(SYS_fdatasync, fd); }));
}

int ftruncate64(int fd, off_t size) {
  return static_cast<int>(change("truncate", root ? path_of(fd) : "", std::to_string(size),
                                 [&] { return syscall(SYS_ftruncate, fd, size); }));
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }
int truncate64(const char* path, off_t size) {
  return static_cast<int>(change("truncate", path_of(AT_FDCWD, path), std::to_string(size),
                                 [&] { return syscall(SYS_truncate, path, size); }));
}
int truncate(const char* path, off_t size) { return truncate64(path, size); }
int fallocate64(int fd, int mode, off_t offset, off_t size) {
  return static_cast<int>(change("unknown", root ? path_of(fd) : "", "",
                                 [&] { return syscall(SYS_fallocate, fd, mode, offset, size); }));
}
int fallocate(int fd, int mode, off_t offset, off_t size) { return fallocate64(fd, mode, offset, size); }
int posix_fallocate64(int fd, off_t offset, off_t size) { return fallocate64(fd, 0, offset, size) ? errno : 0; }
int posix_fallocate(int fd, off_t offset, off_t size) { return posix_fallocate64(fd, offset, size); }

ssize_t write(int fd, const void* data, size_t size) { return written(fd, data, size, -1); }
ssize_t pwrite64(int fd, const void* data, size_t size, off_t offset) { return written(fd, data, size, offset); }
ssize_t pwrite(int fd, const void* data, size_t size, off_t offset) { return written(fd, data, size, offset); }
ssize_t writev(int fd, const iovec* parts, int count) {
  if (!root) return syscall(SYS_writev, fd, parts, count);
  return gathered(fd, parts, count, -1);
}
ssize_t pwritev64(int fd, const iovec* parts, int count, off_t offset) {
  if (!root) return syscall(SYS_pwritev, fd, parts, count, offset, 0L);
  return gathered(fd, parts, count, offset);
}
ssize_t pwritev(int fd, const iovec* parts, int count, off_t offset) { return pwritev64(fd, parts, count, offset); }
ssize_t sendfile64(int to, int from, off_t* offset, size_t size) {
  return change("unknown", root ? path_of(to) : "", "", [&] { return syscall(SYS_sendfile, to, from, offset, size); });
}
ssize_t sendfile(int to, int from, off_t* offset, size_t size) { return sendfile64(to, from, offset, size); }
ssize_t copy_file_range(int from, off64_t* from_offset, int to, off64_t* to_offset, size_t size, unsigned flags) {
  return change("unknown", root ? path_of(to) : "", "",
                [&] { return syscall(SYS_copy_file_range, from, from_offset, to, to_offset, size, flags); });
}

void* mmap64(void* address, size_t size, int protection, int flags, int fd, off_t offset) {
  const auto call = [&] { return syscall(SYS_mmap, address, size, protection, flags, fd, offset); };
  const bool writes = root && fd >= 0 && (protection & PROT_WRITE) && (flags & MAP_SHARED);
  return reinterpret_cast<void*>(writes ? change("unknown", path_of(fd), "", call) : call());
}
void* mmap(void* address, size_t size, int protection, int flags, int fd, off_t offset) {
  return mmap64(address, size, protection, flags, fd, offset);
}

}  // extern "C"
