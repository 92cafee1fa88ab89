#include "store/mapped_file.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <mutex>
#include <system_error>

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace gids::store {

// A mapping. Slots are used again, and never freed: the signal handler walks over all of them.
struct MapSlot {
  std::atomic<uintptr_t> begin{0}, end{0};  // addresses; end 0: not in use
  std::atomic<u64> faults{0}, retried{0};   // retried: how many of them have their page mapped again
  std::atomic<u64> offset{0};               // of the last fault, in the file
  bool used = false;
  int fd = -1;
  std::string path;
  MapSlot* next = nullptr;
};

namespace {

// The order in the handler (zeros are mapped, then the slot's faults are counted, then all, while `absorbing` is not 0)
// is what guards rely on. A thread that retries a counted fault finds its zeros in place. A thread that has read zeros
// finds them counted, or waits until they are.
std::atomic<MapSlot*> slots{nullptr};
std::atomic<u32> absorbing{0};
std::atomic<u64> all_faults{0};
std::atomic<u64> all_retried{0};  // the value of all_faults when no page of zeros was left
std::atomic<MapSlot*> last_met{nullptr};
std::mutex mutex;  // of everything but the atomics

struct sigaction previous;
std::atomic<bool> passed_on{false};

// Read by the handler: allocated with the thread, so that no access allocates.
__attribute__((tls_model("initial-exec"))) thread_local MapGuard* current_guard = nullptr;

uintptr_t page_bytes() {
  static const uintptr_t bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// In place of what is mapped there, which others read meanwhile: the system call itself, because tools that watch mmap
// call that a race.
bool map_over(uintptr_t begin, uintptr_t end, int flags, int fd) {
  return syscall(SYS_mmap, begin, end - begin, PROT_READ, flags | MAP_FIXED, fd, 0) != -1;
}

bool map_zeros(uintptr_t begin, uintptr_t end) {
  return map_over(begin, end, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
}

// The handler before ours, or the default, gets the signal: at once if it was sent, else when the fault repeats. If it
// comes back here (ours was the one before it), the default ends the process.
void pass_on(int number, bool sent) {
  struct sigaction to = previous;
  if (passed_on.exchange(true)) {
    to = {};
    to.sa_handler = SIG_DFL;
  }
  sigaction(number, &to, nullptr);
  if (sent) raise(number);
}

}  // namespace

// In the signal handler. Whether the address is in a mapped file, and this thread has a guard.
bool absorb_fault(size_t address) {
  MapGuard* const guard = current_guard;
  if (!guard) return false;
  for (MapSlot* slot = slots.load(std::memory_order_acquire); slot; slot = slot->next) {
    const uintptr_t end = slot->end.load(std::memory_order_acquire),
                    begin = slot->begin.load(std::memory_order_acquire);
    if (address < begin || address >= end || slot->end.load(std::memory_order_acquire) != end) continue;
    // With every fault 8 times as many pages: a file that was truncated does not cost a signal for each of its pages.
    const u64 before = slot->faults.load() - slot->retried.load();
    const uintptr_t page = address / page_bytes() * page_bytes();
    const uintptr_t most = page_bytes() << std::min<u64>(3 * before, 36);
    absorbing.fetch_add(1);
    if (!map_zeros(page, page + std::min(most, end - page)) && !map_zeros(begin, end)) {
      absorbing.fetch_sub(1);
      return false;
    }
    slot->offset.store(address - begin, std::memory_order_relaxed);
    guard->met_.store(slot, std::memory_order_relaxed);
    last_met.store(slot, std::memory_order_relaxed);
    slot->faults.fetch_add(1);
    all_faults.fetch_add(1);
    absorbing.fetch_sub(1);
    return true;
  }
  return false;
}

namespace {

void on_bus_error(int number, siginfo_t* info, void*) {
  const int before = errno;
  const bool sent = info->si_code <= 0;
  if (sent || !absorb_fault(reinterpret_cast<uintptr_t>(info->si_addr))) pass_on(number, sent);
  errno = before;
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) && action.sa_sigaction == on_bus_error;
}

// Maps the files again over their zeros. Returns how many faults have no zeros any more; with the lock.
u64 retry() {
  const u64 seen = all_faults.load();
  bool every = true;
  for (MapSlot* slot = slots.load(); slot; slot = slot->next) {
    const u64 faults = slot->faults.load();
    if (!slot->used || faults == slot->retried.load()) continue;
    if (map_over(slot->begin.load(), slot->end.load(), MAP_PRIVATE, slot->fd)) slot->retried.store(faults);
    else every = false;
  }
  if (every) all_retried.store(seen);
  return all_retried.load();
}

// Why the byte could not be read.
int error_at(int fd, u64 offset) {
  struct stat s{};
  if (fstat(fd, &s) != 0) return errno;
  if (static_cast<u64>(s.st_size) <= offset) return ENODATA;
  char byte;
  return pread(fd, &byte, 1, static_cast<off_t>(offset)) < 0 ? errno : EIO;
}

}  // namespace

MappedFile::MappedFile(int fd, u64 bytes, std::string path) : bytes_(bytes) {
  MapGuard::prepare();
  const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) throw std::system_error(errno, std::generic_category(), "cannot duplicate the descriptor of " + path);
  // Private: FUSE may refuse other maps. Nothing is written, so no page is copied.
  void* const m = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, copy, 0);
  if (m == MAP_FAILED) {
    const int error = errno;
    close(copy);
    throw std::system_error(error, std::generic_category(), "cannot map " + path);
  }
  std::lock_guard lock(mutex);
  MapSlot* slot = slots.load();
  while (slot && slot->used) slot = slot->next;
  const bool added = !slot;
  if (added) slot = new MapSlot;
  slot->used = true;
  slot->fd = copy;
  slot->path = std::move(path);
  slot->retried.store(slot->faults.load());
  slot->begin.store(reinterpret_cast<uintptr_t>(m), std::memory_order_release);
  slot->end.store(reinterpret_cast<uintptr_t>(m) + align_up(bytes, u64{page_bytes()}), std::memory_order_release);
  slot_ = slot;
  if (added) {
    slot->next = slots.load();
    slots.store(slot, std::memory_order_release);
  }
}

MappedFile::~MappedFile() {
  std::lock_guard lock(mutex);
  slot_->end.store(0);
  munmap(reinterpret_cast<void*>(slot_->begin.load()), bytes_);
  close(slot_->fd);
  slot_->used = false;
}

const std::byte* MappedFile::data() const { return reinterpret_cast<const std::byte*>(slot_->begin.load()); }
int MappedFile::fd() const { return slot_->fd; }

MapGuard::MapGuard() : before_(current_guard), seen_(all_retried.load()) {
  if (seen_ != all_faults.load()) {
    std::lock_guard lock(mutex);
    seen_ = retry();
  }
  current_guard = this;
}

MapGuard::~MapGuard() { current_guard = before_; }

bool MapGuard::failed() const {
  while (absorbing.fetch_add(0)) sched_yield();  // for a system call; not a load, which may go before the reads
  return all_faults.load() != seen_;
}

void MapGuard::raise() const {
  std::lock_guard lock(mutex);
  const MapSlot* slot = met_.load();
  if (!slot) slot = last_met.load();
  const u64 offset = slot->offset.load();
  const int error = slot->used ? error_at(slot->fd, offset) : EIO;
  const std::string path = slot->path;
  retry();
  const std::string reason =
      error == ENODATA ? "the file was truncated after the dataset was opened" : std::generic_category().message(error);
  throw MapFault(error, "cannot read a memory-mapped file: " + reason, path, offset);
}

void MapGuard::prepare() {
  struct sigaction now{};
  if (sigaction(SIGBUS, nullptr, &now) != 0 || is_ours(now)) return;
  std::lock_guard lock(mutex);
  if (sigaction(SIGBUS, nullptr, &now) != 0 || is_ours(now)) return;
  // A forked child must not inherit the lock of a thread that it does not have.
  static const int forks = pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
  (void)forks;
  page_bytes();
  previous = now;
  passed_on.store(false);
  struct sigaction ours{};
  ours.sa_sigaction = on_bus_error;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGBUS, &ours, nullptr);
}

std::optional<u32> value_at(const u32* at) {
  try {
    return read_mapped([&] { return *static_cast<const volatile u32*>(at); });
  } catch (const MapFault&) {
    return {};
  }
}

MapGuard* MapGuard::current() { return current_guard; }

MapGuard::Join::Join(MapGuard* guard) : before_(current_guard) { current_guard = guard; }
MapGuard::Join::~Join() { current_guard = before_; }

}  // namespace gids::store
