// Planning for the cache in device memory: the pages that a minibatch hits, the missing pages that get a line, and
// the lines that they replace. Metadata only; device_cache_rows.cu copies rows. Launched by
// gids/cache/device/feature_cache.py, all on one stream, so that kernels see the results of those before them. Grids
// may have any size; blocks are multiples of 32 threads.
//
// A plan: clear_set -> look_up -> scan_lines -> take_lines -> admit_pages. Its cost follows the minibatch.
#include "gids/device_cache.h"

namespace device = gids::device;
namespace score = gids::score;
namespace word = gids::word;
using gids::i64;
using gids::local_ref;
using gids::u32;
using gids::u64;

namespace {

constexpr auto relaxed = gids::memory_order_relaxed;

__device__ u64 thread_index() { return u64{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ u64 thread_count() { return u64{gridDim.x} * blockDim.x; }
__device__ u32 lane() { return threadIdx.x % 32; }

// Adds the number of lanes with a true argument to a counter, by one atomic. All lanes call.
__device__ void count(u64& counter, bool mine) {
  const u32 votes = __ballot_sync(~0u, mine);
  if (votes && lane() == 0) local_ref<u64>(counter).fetch_add(static_cast<u64>(__popc(votes)), relaxed);
}

// Consecutive numbers for the lanes that want one, by one atomic per warp. All lanes call.
template <class T>
__device__ T draw(T& counter, bool mine) {
  const u32 votes = __ballot_sync(~0u, mine);
  T first = 0;
  if (votes && lane() == 0) first = local_ref<T>(counter).fetch_add(static_cast<T>(__popc(votes)), relaxed);
  return __shfl_sync(~0u, first, 0) + static_cast<T>(__popc(votes & ((1u << lane()) - 1)));
}

__device__ void clear_histogram(u32* histogram) {
  for (u32 b = threadIdx.x; b < score::buckets; b += blockDim.x) histogram[b] = 0;
  __syncthreads();
}
__device__ void add_histogram(const u32* histogram, u32* sum) {
  __syncthreads();
  for (u32 b = threadIdx.x; b < score::buckets; b += blockDim.x)
    if (histogram[b]) atomicAdd(&sum[b], histogram[b]);
}

__device__ void show(const u64* counters, u64* host, u64 n) {
  for (u64 i = threadIdx.x; i < n; i += blockDim.x) host[i] = counters[i];
}

// True in all threads of the last block that calls it. What the blocks before wrote is visible to it.
__device__ bool last_block(u32& arrived) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = local_ref<u32>(arrived).fetch_add(1, gids::memory_order_acq_rel) + 1 == gridDim.x;
    if (last) local_ref<u32>(arrived).store(0, relaxed);
  }
  __syncthreads();
  return last;
}

// The bucket of a line, free_line or protected_line.
__device__ u32 bucket_of_line(const device::Table& t, u64 line, u32 planned, u64 next_step) {
  const u64 owner = t.owners[line];
  if (owner == 0) return score::free_line;
  return score::of_line(static_cast<score::Policy>(t.policy), t.words[owner - 1], line, planned, next_step);
}

// Loops in warps: all lanes make the same number of rounds.
template <class F>
__device__ void for_each(u64 n, F&& f) {
  for (u64 first = thread_index() - lane(); first < n; first += thread_count()) f(first + lane(), first + lane() < n);
}

// By one block: decides which scores stay, moves the hand on, and leaves the histograms empty. The lanes of a warp sum
// neighboring buckets; the one whose buckets hold the cut finds it.
__device__ void cut(const device::Table& t, device::Choice* choice, u64 missing, u64 next_step, u32* lines,
                    u32* misses) {
  for (u32 b = threadIdx.x; b < score::buckets; b += blockDim.x) {
    lines[b] = choice->lines[b];
    misses[b] = choice->misses[b];
    choice->lines[b] = choice->misses[b] = 0;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const u64 hand = choice->hand;
  const u32 drop = missing > choice->free ? static_cast<u32>(missing - choice->free) : 0;
  constexpr u32 each = score::buckets / 32;
  const u32 first = lane() * each;
  u32 through = 0;  // counted in the buckets of this lane and of those before it
  for (u32 b = first; b < first + each; ++b) through += lines[b] + misses[b];
  const u32 mine = through;
  for (u32 step = 1; step < 32; step *= 2) {
    const u32 before = __shfl_up_sync(~0u, through, step);
    if (lane() >= step) through += before;
  }
  const u32 before = through - mine;
  score::Cut least{0, 0, 0};
  if (before < drop && drop <= through) least = score::cut(lines, misses, drop - before, first, first + each);
  else if (drop != 0 || lane() != 0) return;
  choice->bucket = least.bucket;
  choice->drop_lines = least.lines;
  choice->drop_misses = least.misses;
  choice->lines_dropped = choice->misses_dropped = choice->taken = choice->given = choice->free = 0;
  choice->first = hand;
  choice->count = device::candidates(t.replaced, missing);
  if (t.replaced == 0) return;
  if (score::by_chance(static_cast<score::Policy>(t.policy))) choice->hand = gids::mix(next_step + 1) % t.replaced;
  else choice->hand = (hand + choice->count) % t.replaced;
}

}  // namespace

// The positions of rows by a table's order, whose entries have `width` bytes (int or i64). An id out of range stays
// as it is.
extern "C" __global__ void gids_find_rows(const device::Table* table, const void* order, u64 width, const i64* ids,
                                          u64 n, i64* rows) {
  const device::Table t = *table;
  for_each(n, [&](u64 i, bool inside) {
    if (!inside) return;
    const i64 id = ids[i];
    if (!t.holds(id)) rows[i] = id;
    else
      rows[i] = width == 4 ? static_cast<i64>(static_cast<const int*>(order)[id]) : static_cast<const i64*>(order)[id];
  });
}

// Marks the pages of a minibatch's rows with the bit of its step. An id out of range marks nothing.
extern "C" __global__ void gids_enter_window(const device::Table* table, device::Counters* counters, const i64* ids,
                                             u64 n, u64 bit) {
  const device::Table t = *table;
  for_each(n, [&](u64 i, bool inside) {
    bool first = false;
    if (inside) {
      const i64 id = ids[i];
      if (t.holds(id)) first = !(word::enter(t.words[t.page_of(id)], static_cast<u32>(bit)) & bit);
      else atomicMax(&counters->bad, ~i);
    }
    count(counters->pages, first);
  });
}

// Removes the marks and zeroes the step's counters.
extern "C" __global__ void gids_retire_window(const device::Table* table, device::Counters* counters, const i64* ids,
                                              u64 n, u64 bit) {
  const device::Table t = *table;
  for (u64 i = thread_index(); i < n; i += thread_count())
    if (t.holds(ids[i])) word::retire(t.words[t.page_of(ids[i])], static_cast<u32>(bit));
  if (thread_index() == 0) *counters = device::Counters{};
}

// Writes the addresses of a plan's arrays. A kernel, because a copy from host memory would wait for the stream.
extern "C" __global__ void gids_describe_misses(device::Misses* misses, u64* keys, u32* values, u64 mask,
                                                u64* requests, u32* scores, u32* lines, u32* slots, u32* first_rows,
                                                u32* next_rows) {
  if (thread_index() == 0)
    *misses = {{keys, values, mask}, requests, scores, lines, slots, first_rows, next_rows};
}

// Empties the set of a plan's missing pages, and their lists of rows.
extern "C" __global__ void gids_clear_set(const device::Misses* misses) {
  const device::Misses m = *misses;
  for (u64 i = thread_index(); i <= m.set.mask; i += thread_count()) {
    m.set.keys[i] = 0;
    m.first_rows[i] = device::no_row;
  }
}

// Finds the missing pages: each becomes a request, with its score and a list of its rows; no line yet. The set is
// empty.
extern "C" __global__ void gids_look_up(const device::Table* table, device::Counters* counters,
                                        const device::Misses* misses, device::Choice* choice, const i64* ids, u64 n,
                                        u64 planned, u64 next_step) {
  __shared__ u32 histogram[score::buckets];
  const device::Table t = *table;
  const device::Misses m = *misses;
  clear_histogram(histogram);
  for_each(n, [&](u64 i, bool inside) {
    bool missing = false, loading = false;
    u64 page = 0, cell = 0, w = 0;
    if (inside && t.holds(ids[i])) {
      page = t.page_of(ids[i]);
      w = t.words[page];
      if (word::state_of(w) != gids::PageState::resident) {
        if (m.set.insert(page, cell)) {
          missing = word::state_of(w) == gids::PageState::absent;
          loading = !missing;
        }
        m.next_rows[i] = local_ref<u32>(m.first_rows[cell]).exchange(static_cast<u32>(i), relaxed);
      }
    }
    count(counters->coalesced, loading);
    const u64 index = draw(counters->misses, missing);
    if (missing) {
      const u32 bucket = score::of_miss(static_cast<score::Policy>(t.policy), w, static_cast<u32>(planned), next_step);
      m.requests[index] = page;
      m.scores[index] = bucket;
      m.lines[index] = device::bypassed;
      atomicAdd(&histogram[bucket], 1u);
    }
    if (missing || loading) m.set.values[cell] = missing ? static_cast<u32>(index) : device::bypassed;
  });
  add_histogram(histogram, choice->misses);
}

// Counts the candidates by bucket: lines from the clock's hand on. The last block makes the cut.
extern "C" __global__ void gids_scan_lines(const device::Table* table, const device::Counters* counters,
                                           device::Choice* choice, u64 planned, u64 next_step) {
  __shared__ u32 histogram[score::buckets + 1], of_misses[score::buckets];
  const device::Table t = *table;
  const u64 n = device::candidates(t.replaced, counters->misses), hand = choice->hand;
  if (threadIdx.x == 0) histogram[score::free_line] = 0;
  clear_histogram(histogram);
  for (u64 i = thread_index(); i < n; i += thread_count()) {
    const u64 line = hand + i < t.replaced ? hand + i : hand + i - t.replaced;
    const u32 bucket = bucket_of_line(t, line, static_cast<u32>(planned), next_step);
    if (bucket != score::protected_line) atomicAdd(&histogram[bucket], 1u);
  }
  add_histogram(histogram, choice->lines);
  if (threadIdx.x == 0 && histogram[score::free_line]) atomicAdd(&choice->free, histogram[score::free_line]);
  if (last_block(choice->arrived)) cut(t, choice, counters->misses, next_step, histogram, of_misses);
}

// Frees the lines below the cut: they become slots for this minibatch.
extern "C" __global__ void gids_take_lines(const device::Table* table, device::Counters* counters,
                                           const device::Misses* misses, device::Choice* choice, u64 planned,
                                           u64 next_step) {
  const device::Table t = *table;
  const device::Misses m = *misses;
  const u64 n = choice->count, hand = choice->first, wanted = counters->misses;
  const u32 cut = choice->bucket, of_cut = choice->drop_lines;
  for_each(n, [&](u64 i, bool inside) {
    u64 line = 0;
    u32 bucket = score::protected_line;
    if (inside) {
      line = hand + i < t.replaced ? hand + i : hand + i - t.replaced;
      bucket = bucket_of_line(t, line, static_cast<u32>(planned), next_step);
    }
    const bool at_cut = bucket == cut && of_cut;
    const u32 ticket = draw(choice->lines_dropped, at_cut);
    const bool dropped = bucket < cut || (at_cut && ticket < of_cut);
    const bool taken = dropped || bucket == score::free_line;
    const u32 slot = draw(choice->taken, taken);
    count(counters->evictions, dropped);
    if (dropped) {
      word::evict(t.words[t.owners[line] - 1], static_cast<u32>(line));
      t.owners[line] = 0;
    }
    if (taken && slot < wanted) m.slots[slot] = static_cast<u32>(line);
  });
}

// Gives the slots to the missing pages above the cut; the others are bypassed. The last block shows the counters to
// the host, in mapped host memory.
extern "C" __global__ void gids_admit_pages(const device::Table* table, device::Counters* counters,
                                            const device::Misses* misses, device::Choice* choice, u64* host) {
  const device::Table t = *table;
  const device::Misses m = *misses;
  const u64 n = counters->misses;
  const u32 cut = choice->bucket, of_cut = choice->drop_misses, slots = choice->taken;
  for_each(n, [&](u64 i, bool inside) {
    const u32 bucket = inside ? m.scores[i] : 0;
    const bool at_cut = inside && bucket == cut && of_cut;
    const u32 ticket = draw(choice->misses_dropped, at_cut);
    const bool above = inside && (bucket > cut || (bucket == cut && (!at_cut || ticket >= of_cut)));
    const u32 slot = draw(choice->given, above);
    const bool admitted = above && slot < slots;
    count(counters->loads, admitted);
    count(counters->bypasses, inside && !admitted);
    if (admitted) {
      const u64 page = m.requests[i];
      const u32 line = m.slots[slot];
      word::admit(t.words[page], line);
      t.owners[line] = page + 1;
      m.lines[i] = line;
    }
  });
  if (last_block(choice->arrived)) show(reinterpret_cast<const u64*>(counters), host, sizeof(device::Counters) / 8);
}

// One block: shows counters to the host, in mapped host memory.
extern "C" __global__ void gids_show_counters(const u64* counters, u64* host, u64 n) { show(counters, host, n); }
