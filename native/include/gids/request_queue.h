// The request queue: GPU threads ask the host for pages, as if the host were an NVMe controller. This header
// is everything that both sides of a queue pair do with its memory, and all of the posting side, so that host
// threads can play the warps. Shared by the CUDA kernels (io/request_queue.cu), the service thread
// (io/queue_service.h) and the tests. Knows nothing of files, engines, lines or steps.
//
// Requests are posted in rounds: one kernel's requests for pages of one table, ended by the doorbell. A queue pair has
// places for rounds_max rounds; round r (0, 1, 2, ...) has place r mod rounds_max, from the kernel that posts it until
// its pages are copied:
//
//     free --post, ring--> posted --take--> reading --answer--> answered --copy--> free
//            poster                service            service              copy engine
//
// A place has round_max entries, a doorbell, an answer and staging for the pages, one after the other. The stream
// waits for the answer (where streams cannot wait for a word, await_round() does); a copy engine then brings the pages
// and the answer to the poster's memory, where kernels read them. So no kernel spins, and none reads host memory for a
// page. At most rounds_max rounds are posted and not copied; one kernel at a time posts.
//
// A poster that gives up waiting after spin_ns leaves a place that the service will still write to. This breaks the
// queue: the poster sets `abandoned`, and the service ends.
//
// Every word that crosses the bus has one writing side, and is only loaded and stored. An entry and a doorbell carry
// the lap of their place: the number of times that it was used before, plus one. Zeroed memory is of no lap, and an
// entry that a smaller round did not write is of an older one; of the lap, 24 bits are compared. An answer carries its
// round.
#pragma once

#include "gids/target.h"

#if !defined(__CUDACC__) && !defined(__CUDACC_RTC__)
#include <sched.h>
#include <time.h>
#endif

namespace gids::queue {

using Request = u64;  // a page of the round's table

constexpr u32 lap_shift = 40;                    // an entry: page | lap << 40
constexpr u32 count_bits = 25, table_bits = 15;  // a doorbell: count | table << 25 | lap << 40
static_assert(count_bits + table_bits == lap_shift);
constexpr u32 tables_max = 1u << table_bits;
constexpr u32 round_limit = 1u << 24;  // requests of a round, at most
constexpr u32 rounds_limit = 64;       // rounds posted and not copied, at most
constexpr u32 slot_unit = 16;          // bytes: a page in device memory is copied in pieces of this size
static_assert(round_limit < 1u << count_bits, "a full round fits a doorbell and an answer");

// The errors of a request besides those of the I/O engine; the values of Linux.
constexpr int corrupt = 74;     // EBADMSG: the page's checksum is wrong
constexpr int broken = 71;      // EPROTO: a doorbell counts an entry that is not there
constexpr int timed_out = 110;  // ETIMEDOUT: no completion, or no answer within spin_ns
constexpr int canceled = 125;   // ECANCELED: the service ended, or the queue is broken
constexpr int invalid = 22;     // EINVAL: no such table or page

// An answer: the number of the round's failed requests | (round + 1) << 25. Or `closed`: the service has ended.
// cuStreamWaitValue64's GEQ compares cyclically, as signed differences; `closed` is above all rounds.
constexpr u64 closed = u64{1} << 62;
GIDS_HD constexpr u64 answer(u64 round, u64 failed) { return (round + 1) << count_bits | failed; }

// One queue pair: pointers and numbers. Kernels take a pointer to one in device memory, whose pointers are the
// device's; the service has one of its own with the host's. All memory starts zeroed.
struct Pair {
  // Pinned host memory. Written by the posting side:
  u64* entries;    // [rounds_max][round_max]
  u64* doorbells;  // [rounds_max]
  u64* abandoned;  // [1] not 0: somebody gave up waiting, the queue is broken
  // Pinned host memory. Written by the service:
  u8* answers;  // [rounds_max][answer_bytes]: the answer, and behind it the error of each request
  u8* staging;  // [rounds_max][round_bytes]
  // Private to the posting side: in device memory, or in host memory if host threads play the blocks.
  u64* arrived;  // [1] blocks that are through with the round

  u64 spin_ns;  // until a kernel that polls gives up
  u64 round_bytes, answer_bytes;
  u32 round_max, rounds_max;

  GIDS_HD u64 place(u64 round) const { return round % rounds_max; }
  GIDS_HD u64 lap(u64 round) const { return round / rounds_max + 1; }
  GIDS_HD u64* entry(u64 round, u64 i) const { return entries + place(round) * round_max + i; }
  GIDS_HD u64* answer(u64 round) const { return reinterpret_cast<u64*>(answers + place(round) * answer_bytes); }
  GIDS_HD u8* pages(u64 round) const { return staging + place(round) * round_bytes; }
};

// The errors of a round's requests, behind its answer.
GIDS_HD int* errors_of(u64* answer) { return reinterpret_cast<int*>(answer + 1); }
GIDS_HD const int* errors_of(const u64* answer) { return reinterpret_cast<const int*>(answer + 1); }

// --- the words, from both sides ---

GIDS_HD bool is_of_lap(const Pair& q, u64 round, u64 word) {
  return (word ^ q.lap(round) << lap_shift) >> lap_shift == 0;
}

// release: what the place's last user read was read before the service may overwrite it.
GIDS_HD void write_entry(const Pair& q, u64 round, u64 i, Request page) {
  system_ref<u64>(*q.entry(round, i)).store(page | q.lap(round) << lap_shift, memory_order_release);
}
GIDS_HD bool read_entry(const Pair& q, u64 round, u64 i, Request& page) {
  const u64 word = system_ref<u64>(*q.entry(round, i)).load(memory_order_acquire);
  page = word & ((u64{1} << lap_shift) - 1);
  return is_of_lap(q, round, word);
}

// release: every entry of the round is visible before its doorbell.
GIDS_HD void write_doorbell(const Pair& q, u64 round, u32 table, u32 count) {
  const u64 word = q.lap(round) << lap_shift | u64{table} << count_bits | count;
  system_ref<u64>(q.doorbells[q.place(round)]).store(word, memory_order_release);
}
GIDS_HD bool read_doorbell(const Pair& q, u64 round, u32& table, u32& count) {
  const u64 word = system_ref<u64>(q.doorbells[q.place(round)]).load(memory_order_acquire);
  table = static_cast<u32>(word >> count_bits) & (tables_max - 1);
  count = static_cast<u32>(word & ((u64{1} << count_bits) - 1));
  return is_of_lap(q, round, word);
}

// release: every page and every error of the round is visible before its answer.
GIDS_HD void write_answer(const Pair& q, u64 round, u64 word) {
  system_ref<u64>(*q.answer(round)).store(word, memory_order_release);
}
GIDS_HD bool is_answered(const Pair& q, u64 round, MemoryOrder order = memory_order_acquire) {
  return static_cast<i64>(system_ref<u64>(*q.answer(round)).load(order) - answer(round, 0)) >= 0;
}

GIDS_HD void abandon(const Pair& q) { system_ref<u64>(*q.abandoned).store(1, memory_order_release); }
GIDS_HD bool read_abandoned(const Pair& q) { return system_ref<u64>(*q.abandoned).load(memory_order_acquire) != 0; }

// --- the posting side ---

// Between polls. First about half as long as a fast SSD takes for a page.
GIDS_HD void relax([[maybe_unused]] u64 spins) {
#if GIDS_SIMT
  __nanosleep(spins == 0 ? 40'000u : 4'000u);
#elif !defined(__CUDACC__) && !defined(__CUDACC_RTC__)
  sched_yield();  // a pause would starve the service where threads outnumber cores
#endif
}

// The time of a clock that runs at the same rate on all processors.
GIDS_HD u64 clock_ns() {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
#else
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<u64>(now.tv_sec) * 1'000'000'000 + static_cast<u64>(now.tv_nsec);
#endif
}

// Requests of a round that starts at requests[first], of `count` in all.
GIDS_HD u64 round_size(const Pair& q, u64 count, u64 first) {
  const u64 left = count > first ? count - first : 0;
  return left < q.round_max ? left : q.round_max;
}

// Thread `thread` of `threads` posts its share of requests[0, size). A request's place in the array is its place in the
// round: the prefix sum that compacted the array reserved it.
GIDS_HD void post_round(const Pair& q, u64 round, const Request* requests, u64 size, u64 thread, u64 threads) {
  for (u64 i = thread; i < size; i += threads) write_entry(q, round, i, requests[i]);
}

// The last of `blocks` callers rings. On the GPU: one thread of each block, after __syncthreads().
GIDS_HD void end_round(const Pair& q, u64 round, u32 table, u64 size, u64 blocks) {
  // acq_rel: the blocks' entries come before the doorbell of the last of them.
  if (local_ref<u64>(*q.arrived).fetch_add(1, memory_order_acq_rel) + 1 != blocks) return;
  local_ref<u64>(*q.arrived).store(0, memory_order_relaxed);
  write_doorbell(q, round, table, static_cast<u32>(size));
}

// Where the stream itself cannot wait for a word: one thread polls. After spin_ns the queue is broken: the service then
// answers what it took and closes, and for that the thread goes on to wait, as long again. False when the service did
// not even close.
GIDS_HD bool await_round(const Pair& q, u64 round) {
  const u64 start = clock_ns();
  bool patient = true;
  for (u64 spins = 0; !is_answered(q, round, poll_order); ++spins) {
    const u64 waited = clock_ns() - start;
    if (patient && waited >= q.spin_ns) {
      abandon(q);
      patient = false;
    }
    if (waited / 2 >= q.spin_ns) return false;
    relax(spins);
  }
  acquire_polled();
  return true;
}

// The error of the round's i-th request, by a copy of the answer that was made after the wait; 0: its page was read.
GIDS_HD int outcome(const u64* copy, u64 round, u64 i) {
  if (*copy >= closed) return canceled;
  if (*copy >> count_bits != round + 1) return timed_out;
  return *copy == answer(round, 0) ? 0 : errors_of(copy)[i];
}

}  // namespace gids::queue
