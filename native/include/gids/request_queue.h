// The request queue: GPU threads ask the host for pages, as if the host were an NVMe controller. This header
// is everything that both sides of a queue pair do with its memory, and all of the posting side, so that host
// threads can play the warps. Shared by the CUDA kernels (io/request_queue.cu), the service thread
// (io/queue_service.h) and the tests. Knows nothing of files, engines, lines or steps.
//
// A queue pair has `depth` slots. Slot i is entry i, status i and staging page i; the request with ticket t
// (0, 1, 2, ...) has slot t mod depth from being posted until its poster has copied the page:
//
//     free --post--> posted --take--> taken --answer--> answered --collect or release--> free
//          poster            service          service             poster
//
// Requests are posted in rounds: one kernel's requests, ended by the doorbell. Two ways to wait:
// * stream: post_round() writes a whole round and the kernel ends; the stream waits for completed >= round + 1
//   (where streams cannot wait for a word, await_round() does); another kernel collects. A round has at most
//   round_max requests, and at most rounds_max are posted and not collected: nothing spins for room.
// * warp (BaM's): read_page() takes a slot, waits for its own status and copies; it spins, within spin_ns.
// A pair is used in one of the ways only; one kernel at a time posts to it.
//
// A poster that gives up after spin_ns may leave a slot that the service will still write to. This breaks the
// queue: the poster sets `abandoned`; from then on nobody posts, and the service ends.
//
// Every word that crosses the bus is 8 bytes, has one writing side, and is only loaded and stored. Its lap tells a new
// word from an old one: the number of times that the slot was used before, plus one (zeroed memory is the lap before
// the first). A few bits of the lap are enough: a slot is posted again only after it was freed, so a reader of lap L
// sees only laps L - 1 and L. Tickets and rounds have 64 bits and do not wrap.
#pragma once

#include "gids/target.h"

#if !defined(__CUDACC__) && !defined(__CUDACC_RTC__)
#include <sched.h>
#include <time.h>
#endif

// Unrolled further, the loops of a warp that also polls would need more registers than it may have.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define GIDS_NO_UNROLL _Pragma("unroll 1")
#else
#define GIDS_NO_UNROLL
#endif

namespace gids::queue {

using Request = u64;     // what to read: page | table << 48
using Submission = u64;  // a request with the lowest bit of its lap on top
static_assert(sizeof(Submission) == 8, "one entry, one store: a 16-byte store is not atomic across the bus");

constexpr u32 page_bits = 48, table_bits = 15;
constexpr u32 tables_max = 1u << table_bits;
constexpr u32 lap_shift = page_bits + table_bits;
static_assert(lap_shift == 63, "the fields fill the entry");
constexpr u32 error_bits = 16;  // a status: error | lap << 16
constexpr u32 count_bits = 32;  // a doorbell: count | round's lap << 32
constexpr u32 doorbells = 64;   // rounds posted and not collected, at most
constexpr u32 slot_unit = 16;   // bytes: a staging page is a multiple of what a lane copies at once

// What a status holds besides the errors of the I/O engine; the values of Linux.
constexpr int try_again = 11;   // EAGAIN: no slot came free within spin_ns; nothing was posted
constexpr int corrupt = 74;     // EBADMSG: the page's checksum is wrong
constexpr int broken = 71;      // EPROTO: a doorbell counts an entry that is not there
constexpr int timed_out = 110;  // ETIMEDOUT: no completion, or no status within spin_ns
constexpr int canceled = 125;   // ECANCELED: the service ended, or the queue is broken
constexpr int invalid = 22;     // EINVAL: no such table or page

// completed >= this: the service has ended and answers no more. cuStreamWaitValue64's GEQ compares cyclically,
// as signed differences; this is above all rounds that a waiter can name.
constexpr u64 closed = u64{1} << 62;
constexpr u64 no_ticket = ~u64{0};

GIDS_HD constexpr Request request(u32 table, u64 page) { return u64{table} << page_bits | page; }
GIDS_HD constexpr u64 page_of(u64 request) { return request & ((u64{1} << page_bits) - 1); }
GIDS_HD constexpr u32 table_of(u64 request) {
  return static_cast<u32>(request >> page_bits) & ((1u << table_bits) - 1);
}

// One queue pair: pointers and numbers. Kernels take a pointer to one in device memory, whose pointers are the
// device's; the service has one of its own with the host's. All memory starts zeroed.
struct Pair {
  // Pinned host memory. Written by the posting side:
  Submission* entries;  // [depth]
  u64* rung;            // [doorbells]
  u64* abandoned;       // [1] not 0: somebody gave up waiting, the queue is broken
  // Pinned host memory. Written by the service:
  u64* statuses;   // [depth]
  u64* completed;  // [1] rounds complete, or `closed`
  u8* staging;     // [depth][slot_bytes]
  // Private to the posting side: in device memory, or in host memory if host threads play the warps.
  u64* head;     // [1] the next ticket
  u64* covered;  // [1] tickets below this belong to rounds that were rung
  u64* arrived;  // [1] blocks that are through with the round
  u64* starts;   // [doorbells] a round's first ticket
  u64* turns;    // [depth] laps of the slot that were released (wait `warp`)

  u64 spin_ns;  // until a lane that polls gives up
  u32 depth_log2;
  u32 slot_bytes;  // a multiple of slot_unit
  u32 round_max;   // requests in a round (wait `stream`)
  u32 rounds_max;  // rounds posted and not collected (wait `stream`)

  GIDS_HD u64 depth() const { return u64{1} << depth_log2; }
  GIDS_HD u64 slot(u64 ticket) const { return ticket & (depth() - 1); }
  GIDS_HD u64 lap(u64 ticket) const { return (ticket >> depth_log2) + 1; }
  GIDS_HD u8* page(u64 ticket) const { return staging + slot(ticket) * slot_bytes; }
};

// --- the words, from both sides ---

// release: what the slot's last user read of the staging page was read before the service may overwrite it.
GIDS_HD void write_entry(const Pair& q, u64 ticket, Request r) {
  system_ref<u64>(q.entries[q.slot(ticket)]).store(r | q.lap(ticket) << lap_shift, memory_order_release);
}
GIDS_HD bool read_entry(const Pair& q, u64 ticket, Request& r) {
  const u64 word = system_ref<u64>(q.entries[q.slot(ticket)]).load(memory_order_acquire);
  r = word & ~(u64{1} << lap_shift);
  return word >> lap_shift == (q.lap(ticket) & 1);
}

// release: the page is in staging before its status is seen.
GIDS_HD void write_status(const Pair& q, u64 ticket, int error) {
  const u64 word = q.lap(ticket) << error_bits | static_cast<u32>(error);
  system_ref<u64>(q.statuses[q.slot(ticket)]).store(word, memory_order_release);
}
// Whether a word is the status of this ticket, and not of the lap before.
GIDS_HD bool is_status(const Pair& q, u64 ticket, u64 word, int& error) {
  error = static_cast<int>(word & ((1u << error_bits) - 1));
  return word >> error_bits == (q.lap(ticket) << error_bits) >> error_bits;
}
GIDS_HD bool read_status(const Pair& q, u64 ticket, int& error, MemoryOrder order = memory_order_acquire) {
  return is_status(q, ticket, system_ref<u64>(q.statuses[q.slot(ticket)]).load(order), error);
}

GIDS_HD constexpr u64 doorbell(u64 round, u32 count) { return (round / doorbells + 1) << count_bits | count; }
// release: every entry of the round is visible before its doorbell.
GIDS_HD void write_doorbell(const Pair& q, u64 round, u32 count) {
  system_ref<u64>(q.rung[round % doorbells]).store(doorbell(round, count), memory_order_release);
}
// Whether the round was rung. A later round may have rung since then (wait `warp`, where nothing waits for empty
// rounds): all requests of this one are answered, and its count is lost.
GIDS_HD bool read_doorbell(const Pair& q, u64 round, u32& count) {
  const u64 word = system_ref<u64>(q.rung[round % doorbells]).load(memory_order_acquire);
  const i64 later = static_cast<i64>(word - doorbell(round, 0)) >> count_bits;
  count = later ? 0 : static_cast<u32>(word);
  return later >= 0;
}

// release: every status and page of the rounds below is visible before the number.
GIDS_HD void write_completed(const Pair& q, u64 rounds) {
  system_ref<u64>(*q.completed).store(rounds, memory_order_release);
}
GIDS_HD u64 read_completed(const Pair& q, MemoryOrder order = memory_order_acquire) {
  return system_ref<u64>(*q.completed).load(order);
}

GIDS_HD void abandon(const Pair& q) { system_ref<u64>(*q.abandoned).store(1, memory_order_release); }
GIDS_HD bool read_abandoned(const Pair& q) { return system_ref<u64>(*q.abandoned).load(memory_order_acquire) != 0; }
// No more requests are answered.
GIDS_HD bool over(const Pair& q) { return read_completed(q, poll_order) >= closed || read_abandoned(q); }

// --- the posting side ---

// The threads that copy one page together. Where there are no lanes a warp is one thread.
struct Warp {
  u32 lane = 0, lanes = 1;

  GIDS_HD u64 from_first(u64 value) const {
#if GIDS_SIMT
    return __shfl_sync(~0u, value, 0);
#else
    return value;
#endif
  }
  // Orders memory too: what lane 0 acquired, all may read.
  GIDS_HD void sync() const {
#if GIDS_SIMT
    __syncwarp();
#endif
  }
};

// Between polls. First about half as long as a fast SSD takes for a page, since the polls of all lanes share the bus
// with the pages.
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

// Plain loads: staging is neither constant nor read-only for the GPU's caches (no __ldg).
GIDS_HD void copy_page(const Warp& warp, u8* to, const u8* from, u32 bytes) {
#if GIDS_SIMT
  if (((reinterpret_cast<u64>(to) | bytes) & 15) == 0) {
    const auto* in = reinterpret_cast<const uint4*>(from);
    auto* out = reinterpret_cast<uint4*>(to);
    const u32 count = bytes / 16, step = warp.lanes;
    u32 i = warp.lane;
    GIDS_NO_UNROLL
    for (; i + step < count; i += 2 * step) {  // two loads in flight: 32 blocks have 256 KB, the bus takes 80
      const uint4 a = in[i], b = in[i + step];
      out[i] = a;
      out[i + step] = b;
    }
    if (i < count) out[i] = in[i];
    return;
  }
  GIDS_NO_UNROLL
  for (u32 i = warp.lane; i < bytes; i += warp.lanes) to[i] = from[i];
#else
  if (warp.lane == 0) __builtin_memcpy(to, from, bytes);
#endif
}

// The last of `blocks` callers gives the round its `posted` more tickets and rings. On the GPU: one thread of
// each block, after __syncthreads().
GIDS_HD void end_round(const Pair& q, u64 round, u64 posted, u64 blocks) {
  // acq_rel: the blocks' entries come before the doorbell of the last of them.
  if (local_ref<u64>(*q.arrived).fetch_add(1, memory_order_acq_rel) + 1 != blocks) return;
  local_ref<u64>(*q.arrived).store(0, memory_order_relaxed);
  local_ref<u64> head(*q.head), covered(*q.covered);
  const u64 start = covered.load(memory_order_relaxed);
  const u64 end = head.load(memory_order_relaxed) + posted;
  head.store(end, memory_order_relaxed);
  covered.store(end, memory_order_relaxed);
  local_ref<u64>(q.starts[round % doorbells]).store(start, memory_order_relaxed);
  write_doorbell(q, round, static_cast<u32>(end - start));
}

// Requests of a round that starts at requests[first], of `count` in all.
GIDS_HD u64 round_size(const Pair& q, u64 count, u64 first) {
  const u64 left = count > first ? count - first : 0;
  return left < q.round_max ? left : q.round_max;
}

// Wait `stream`, first kernel: thread `thread` of `threads` posts its share of requests[0, size). The request's
// place in the array is its place in the round: the prefix sum that compacted the array reserved the tickets.
// The head stays until end_round(): all threads read the same.
GIDS_HD void post_round(const Pair& q, const Request* requests, u64 size, u64 thread, u64 threads) {
  const u64 base = local_ref<u64>(*q.head).load(memory_order_relaxed);
  for (u64 i = thread; i < size; i += threads) write_entry(q, base + i, requests[i]);
}

// Wait `stream` where the stream itself cannot wait for a word: one thread polls. After spin_ns the queue is
// broken: the service then answers what it took and closes, and for that the thread goes on to wait, as long again.
// So statuses change no more under the kernels that follow. False when the service did not even close.
GIDS_HD bool await_round(const Pair& q, u64 round) {
  const u64 start = clock_ns();
  bool patient = true;
  for (u64 spins = 0; read_completed(q, poll_order) <= round; ++spins) {
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

// The ticket of the round's i-th request, in kernels that follow the one that posted the round.
GIDS_HD u64 ticket_of(const Pair& q, u64 round, u64 i) {
  return local_ref<u64>(q.starts[round % doorbells]).load(memory_order_relaxed) + i;
}

// Wait `stream`, in kernels that follow the wait for completed >= round + 1: the error of a ticket of the round.
// 0: the thread that asked may read q.page(ticket), and those that meet it behind a barrier.
GIDS_HD int outcome(const Pair& q, u64 ticket) {
  int error;
  if (read_status(q, ticket, error)) return error;
  return read_completed(q) >= closed ? canceled : timed_out;
}
// The same, of a status that was copied to device memory after the wait.
GIDS_HD int outcome_of(const Pair& q, u64 ticket, u64 word) {
  int error;
  if (is_status(q, ticket, word, error)) return error;
  return read_completed(q) >= closed ? canceled : timed_out;
}

// Wait `stream`, second kernel: copies the page of the round's i-th request, by one warp. Returns its error; `to`
// is untouched then.
GIDS_HD int collect_page(const Pair& q, u64 round, u64 i, const Warp& warp, u8* to, u32 bytes) {
  const u64 ticket = ticket_of(q, round, i);
  int error = 0;
  if (warp.lane == 0) error = outcome(q, ticket);
  error = static_cast<int>(warp.from_first(static_cast<u64>(error)));  // one answer for all lanes
  warp.sync();
  if (error == 0) copy_page(warp, to, q.page(ticket), bytes);
  return error;
}

// Wait `warp`: takes a slot, or returns no_ticket when none came free in time or the queue is over. Reserves
// nothing then: a ticket that nobody posts would stop the queue for ever.
GIDS_HD u64 reserve(const Pair& q) {
  if (read_abandoned(q)) return no_ticket;
  local_ref<u64> head(*q.head);
  u64 ticket = head.load(memory_order_relaxed);
  u64 start = 0;  // of waiting for a slot
  for (u64 spins = 0;;) {
    // acquire: the slot's last user has read what it wanted of the page.
    if (local_ref<u64>(q.turns[q.slot(ticket)]).load(memory_order_acquire) + 1 == q.lap(ticket)) {
      if (head.compare_exchange_weak(ticket, ticket + 1, memory_order_relaxed, memory_order_relaxed)) return ticket;
      continue;  // another took it: not a wait
    }
    const u64 now = head.load(memory_order_relaxed);
    if (now == ticket) {  // full
      if (spins == 0) start = clock_ns();
      if (clock_ns() - start >= q.spin_ns || over(q)) return no_ticket;
      relax(spins++);
    }
    ticket = now;
  }
}

// Gives the slot back; the page in staging is lost.
GIDS_HD void release(const Pair& q, u64 ticket) {
  local_ref<u64>(q.turns[q.slot(ticket)]).store(q.lap(ticket), memory_order_release);
}

// Waits for the status of a ticket. False when spin_ns passed first: the slot must not be released, for the
// service may still write to it, and the queue is broken.
GIDS_HD bool await_status(const Pair& q, u64 ticket, int& error) {
  const u64 start = clock_ns();
  for (u64 spins = 0;; ++spins) {
    if (read_status(q, ticket, error, poll_order)) {
      acquire_polled();
      return true;
    }
    if (spins % 16 == 15 && read_completed(q) >= closed) {
      if (!read_status(q, ticket, error)) error = canceled;  // all statuses come before `closed`
      return true;
    }
    if (clock_ns() - start >= q.spin_ns) break;
    relax(spins);
  }
  abandon(q);
  error = timed_out;
  return false;
}

// Wait `warp`: one warp reads one page. Returns the error; `to` is untouched then. One request at a time per
// warp: whoever holds a slot waits for the service only, so that a ring of any depth goes on.
GIDS_HD int read_page(const Pair& q, Request r, const Warp& warp, u8* to, u32 bytes) {
  u64 ticket = no_ticket;
  int error = try_again;
  bool answered = false;
  if (warp.lane == 0) {
    ticket = reserve(q);
    if (ticket != no_ticket) {
      write_entry(q, ticket, r);
      answered = await_status(q, ticket, error);
    } else if (over(q)) {
      error = canceled;
    }
  }
  ticket = warp.from_first(ticket);
  error = static_cast<int>(warp.from_first(static_cast<u64>(error)));
  warp.sync();
  if (error == 0) copy_page(warp, to, q.page(ticket), bytes);
  warp.sync();
  if (answered) release(q, ticket);
  return error;
}

}  // namespace gids::queue
