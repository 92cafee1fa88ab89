#include "io/queue_memory.h"

#include <algorithm>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>

#include <sys/mman.h>
#include <unistd.h>

namespace gids::io {
namespace {

constexpr u64 memory_page = 4096;
constexpr u64 sector = 128;  // of a GPU's caches: words of different writers do not share one

void require(bool fine, const std::string& what) {
  if (!fine) throw std::invalid_argument("request queue: " + what);
}

// Hands out aligned pieces of a block. A number, for it also counts what a block must hold before there is one.
struct Carver {
  uintptr_t base;
  u64 used = 0;
  template <class T> T* take(u64 count, u64 alignment = sector) {
    used = align_up(used, alignment);
    T* piece = reinterpret_cast<T*>(base + used);
    used += count * sizeof(T);
    return piece;
  }
};

void carve_shared(Carver& c, queue::Pair& q) {
  q.entries = c.take<u64>(u64{q.rounds_max} * q.round_max);
  q.doorbells = c.take<u64>(q.rounds_max);
  q.abandoned = c.take<u64>(1);
  q.answers = c.take<u8>(q.rounds_max * q.answer_bytes);
  q.staging = c.take<u8>(q.rounds_max * q.round_bytes, memory_page);
}

void carve_local(Carver& c, queue::Pair& q) { q.arrived = c.take<u64>(1); }

}  // namespace

QueueMemory::QueueMemory(const QueueOptions& options) : options_(options) {
  require(options.slot_bytes >= queue::slot_unit && options.slot_bytes % queue::slot_unit == 0,
          "slot_bytes must be a positive multiple of " + std::to_string(queue::slot_unit) + " (got " +
              std::to_string(options.slot_bytes) + ")");
  require(options.rounds_max >= 1 && options.rounds_max <= queue::rounds_limit,
          "rounds_max must be 1 to " + std::to_string(queue::rounds_limit) + " (got " +
              std::to_string(options.rounds_max) + ")");
  const u64 pages = options.staging_bytes / options.rounds_max / options.slot_bytes;
  require(pages >= 1, "staging_bytes is " + std::to_string(options.staging_bytes) + "; " +
                          std::to_string(options.rounds_max) + " rounds of at least a page of " +
                          std::to_string(options.slot_bytes) + " B need " +
                          std::to_string(u64{options.rounds_max} * options.slot_bytes));
  round_max_ = static_cast<u32>(std::min<u64>(pages, queue::round_limit));

  queue::Pair q = pair(nullptr);
  Carver shared{0}, local{0};
  carve_shared(shared, q);
  carve_local(local, q);
  shared_bytes_ = align_up(shared.used, memory_page);
  local_bytes_ = align_up(local.used, sector);

  void* m = mmap(nullptr, shared_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) throw std::bad_alloc();
  madvise(m, shared_bytes_, MADV_HUGEPAGE);  // hints: a kernel without them still works
  madvise(m, shared_bytes_, MADV_DONTFORK);
  shared_ = {static_cast<std::byte*>(m), [bytes = shared_bytes_, pid = getpid()](std::byte* p) {
               if (getpid() == pid) munmap(p, bytes);  // a forked child has other things at this address
             }};
}

queue::Pair QueueMemory::pair(std::byte* local) const {
  return pair(reinterpret_cast<uintptr_t>(shared_.get()), reinterpret_cast<uintptr_t>(local));
}

queue::Pair QueueMemory::pair(u64 shared, u64 local) const {
  queue::Pair q{};
  q.spin_ns = options_.spin_ns;
  q.rounds_max = options_.rounds_max;
  q.round_max = round_max_;
  q.round_bytes = align_up(u64{round_max_} * options_.slot_bytes, memory_page);
  q.answer_bytes = align_up(sizeof(u64) + sizeof(int) * u64{round_max_}, sector);
  Carver theirs{shared}, own{local};
  carve_shared(theirs, q);
  carve_local(own, q);
  return q;
}

}  // namespace gids::io
