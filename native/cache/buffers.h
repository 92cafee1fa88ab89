// Output buffers, recycled: memory fresh from the kernel costs more in page faults than the copy into it.
// A buffer comes back when its last holder lets go, from any thread, also after the pool's owner is gone.
// Users own these tensors, so a forked worker may read them.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

#include "cache/memory.h"

namespace gids::cache {

class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  // Keeps idle buffers as long as they and those in use take at most `keep_bytes`.
  explicit BufferPool(size_t keep_bytes) : keep_bytes_(keep_bytes) {}

  struct Buffer {
    HugeArray<std::byte> memory;
    std::shared_ptr<BufferPool> home;
    ~Buffer() { home->put(std::move(memory)); }
  };

  // At least `bytes`, aligned to a memory page. Contents are arbitrary. Sizes are rounded up so that requests of
  // slightly different sizes share buffers. room: a larger size that later requests may have; where `bytes` is more
  // than half of it, the buffer has room for it. Memory that is never written takes none.
  std::shared_ptr<Buffer> take(size_t bytes, size_t room = 0) {
    const size_t size = bytes <= room && room < 2 * bytes ? align_up(room, 4096) : round_up(bytes);
    size_t longest = 2 * size;  // a longer one is left to requests of another room
    if (room) longest = std::min<size_t>(longest, std::max<size_t>(size, align_up(room, 4096)));
    std::unique_lock lock(mutex_);
    HugeArray<std::byte> memory;
    auto it = idle_.lower_bound(size);
    if (it != idle_.end() && it->first <= longest) {
      memory = std::move(it->second);
      forget(it);
    } else if (it != idle_.begin() && 2 * (--it)->first >= size) {
      forget(it);  // slightly too small: the new buffer takes its place, or those of growing requests would pile up
    }
    lock.unlock();
    if (memory.size() == 0) {
      make_room(size);
      memory = HugeArray<std::byte>(size, true);
    }
    auto buffer = std::shared_ptr<Buffer>(new Buffer{std::move(memory), shared_from_this()});
    lock.lock();
    taken_bytes_ += buffer->memory.bytes();
    peak_bytes_ = std::max(peak_bytes_, taken_bytes_ + idle_bytes_);
    return buffer;
  }

  void keep(size_t bytes) {
    std::lock_guard lock(mutex_);
    keep_bytes_ = bytes;
    trim(0);
  }
  size_t taken_bytes() const { return locked(taken_bytes_); }
  size_t idle_bytes() const { return locked(idle_bytes_); }
  size_t peak_bytes() const { return locked(peak_bytes_); }

 private:
  size_t locked(const size_t& v) const {
    std::lock_guard lock(mutex_);
    return v;
  }
  // Up to a multiple of an eighth of the power of two below.
  static size_t round_up(size_t bytes) {
    size_t step = 4096;
    while (step * 16 < bytes) step *= 2;
    return align_up(bytes ? bytes : 1, step);
  }
  void put(HugeArray<std::byte> memory) {
    std::lock_guard lock(mutex_);
    taken_bytes_ -= memory.bytes();
    idle_bytes_ += memory.bytes();
    const size_t bytes = memory.bytes();
    idle_.emplace(bytes, std::move(memory));
    trim(0);
  }
  // Idle buffers too small to serve must not stand beside the one that is about to be made.
  void make_room(size_t bytes) {
    std::lock_guard lock(mutex_);
    trim(bytes);
  }
  void trim(size_t wanted) {
    while (taken_bytes_ + idle_bytes_ + wanted > keep_bytes_ && !idle_.empty()) forget(idle_.begin());
  }
  void forget(std::multimap<size_t, HugeArray<std::byte>>::iterator it) {
    idle_bytes_ -= it->first;
    idle_.erase(it);
  }

  mutable std::mutex mutex_;
  size_t keep_bytes_;
  size_t taken_bytes_ = 0, idle_bytes_ = 0, peak_bytes_ = 0;
  std::multimap<size_t, HugeArray<std::byte>> idle_;
};

}  // namespace gids::cache
