#include "io/queue_memory.h"

#include <bit>
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
constexpr u64 depth_max = u64{1} << 24;

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
  q.entries = c.take<queue::Submission>(q.depth());
  q.rung = c.take<u64>(queue::doorbells);
  q.abandoned = c.take<u64>(1);
  q.statuses = c.take<u64>(q.depth());
  q.completed = c.take<u64>(1);
  q.staging = c.take<u8>(q.depth() * q.slot_bytes, memory_page);
}

void carve_local(Carver& c, queue::Pair& q) {
  q.head = c.take<u64>(1);
  q.covered = c.take<u64>(1);
  q.arrived = c.take<u64>(1);
  q.starts = c.take<u64>(queue::doorbells);
  q.turns = c.take<u64>(q.depth());
}

}  // namespace

QueueMemory::QueueMemory(const QueueOptions& options) : options_(options) {
  require(
      options.pairs >= 1 && options.pairs <= QueueOptions::pairs_max,
      "pairs must be 1 to " + std::to_string(QueueOptions::pairs_max) + " (got " + std::to_string(options.pairs) + ")");
  require(options.slot_bytes >= queue::slot_unit && options.slot_bytes % queue::slot_unit == 0,
          "slot_bytes must be a positive multiple of " + std::to_string(queue::slot_unit) + " (got " +
              std::to_string(options.slot_bytes) + ")");
  require(options.rounds_max >= 1 && options.rounds_max <= queue::doorbells,
          "rounds_max must be 1 to " + std::to_string(queue::doorbells) + " (got " +
              std::to_string(options.rounds_max) + ")");
  const u64 slots = options.staging_bytes / options.pairs / options.slot_bytes;
  const u64 least = std::bit_ceil(u64{options.rounds_max});  // a page for each round, in a power of two
  require(slots >= least, "staging_bytes is " + std::to_string(options.staging_bytes) + "; " +
                              std::to_string(options.pairs) + " pairs of at least " + std::to_string(least) +
                              " pages of " + std::to_string(options.slot_bytes) + " B need " +
                              std::to_string(u64{options.pairs} * least * options.slot_bytes));
  depth_ = std::bit_floor(slots);
  require(depth_ <= depth_max, "a pair can have at most 2^24 slots: use more pairs or less staging");

  queue::Pair q = pair(0, nullptr);
  Carver shared{0}, local{0};
  carve_shared(shared, q);
  carve_local(local, q);
  pair_bytes_ = align_up(shared.used, memory_page);
  pair_local_bytes_ = align_up(local.used, sector);
  shared_bytes_ = pair_bytes_ * options.pairs;
  local_bytes_ = pair_local_bytes_ * options.pairs;

  void* m = mmap(nullptr, shared_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) throw std::bad_alloc();
  madvise(m, shared_bytes_, MADV_HUGEPAGE);  // hints: a kernel without them still works
  madvise(m, shared_bytes_, MADV_DONTFORK);
  shared_ = {static_cast<std::byte*>(m), [bytes = shared_bytes_, pid = getpid()](std::byte* p) {
               if (getpid() == pid) munmap(p, bytes);  // a forked child has other things at this address
             }};
}

queue::Pair QueueMemory::pair(u32 i, std::byte* local) const {
  return pair(i, reinterpret_cast<uintptr_t>(shared_.get()), reinterpret_cast<uintptr_t>(local));
}

queue::Pair QueueMemory::pair(u32 i, u64 shared, u64 local) const {
  queue::Pair q{};
  q.spin_ns = options_.spin_ns;
  q.depth_log2 = static_cast<u32>(std::countr_zero(depth_));
  q.slot_bytes = options_.slot_bytes;
  q.rounds_max = options_.rounds_max;
  q.round_max = static_cast<u32>(depth_ / options_.rounds_max);
  Carver theirs{shared + i * pair_bytes_};
  Carver own{local + i * pair_local_bytes_};
  carve_shared(theirs, q);
  carve_local(own, q);
  return q;
}

}  // namespace gids::io
