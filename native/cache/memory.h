// Anonymous, page-aligned, zeroed memory on huge pages where the kernel gives them. Unless told otherwise
// a forked child does not inherit it: neither the cost nor a copy-on-write race with reads in flight.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <utility>

#include "gids/target.h"

namespace gids {

template <class T>
class HugeArray {
 public:
  HugeArray() = default;
  explicit HugeArray(size_t count, bool inherited = false) : count_(count) {
    if (count == 0) return;
    void* p = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<T*>(p);
    madvise(p, bytes(), MADV_HUGEPAGE);  // a hint: a kernel without it still works
    if (!inherited) madvise(p, bytes(), MADV_DONTFORK);
  }
  ~HugeArray() {
    if (data_) munmap(data_, bytes());
  }
  HugeArray(HugeArray&& other) noexcept { swap(other); }
  HugeArray& operator=(HugeArray&& other) noexcept {
    swap(other);
    return *this;
  }
  void swap(HugeArray& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
  }

  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return count_; }
  size_t bytes() const { return count_ * sizeof(T); }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

}  // namespace gids
