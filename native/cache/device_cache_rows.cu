// The rows of the cache in device memory: copies pages that were read into lines, and rows from lines, and from pages
// without a line, into the output, converting them if needed. Launched by gids/cache/device/feature_cache.py on the
// stream that planned. Grids may have any size; blocks are multiples of 32 threads.
#include "gids/device_cache.h"
#include "gids/request_queue.h"
#include "gids/row_copy.h"

namespace device = gids::device;
namespace word = gids::word;
using gids::gather_rows;
using gids::i64;
using gids::lane;
using gids::local_ref;
using gids::u32;
using gids::u64;
using gids::u8;
using gids::warp_count;
using gids::warp_index;

namespace {

__device__ u64 address(const u8* p) { return reinterpret_cast<u64>(p); }

// Missing pages of a round that starts at `first`.
__device__ u64 round_size(const device::Counters& counters, u64 first, u64 round_max) {
  const u64 left = counters.misses > first ? counters.misses - first : 0;
  return left < round_max ? left : round_max;
}

}  // namespace

// The pages of one round, as it was posted from misses [first, first + round_max), from the copy of the round: into the
// lines that they won, which become RESIDENT; of those that won none, the rows go to the output. A page that could not
// be read gives its line back; so do all without an answer, as the round was given up. A warp takes a page.
extern "C" __global__ __launch_bounds__(256, 4) void gids_take_round(
    const device::Table* table, device::Counters* counters, const device::Misses* misses, u64 first, u64 round_max,
    u64 number, const u8* pages, const u64* answer, const i64* ids, u8* out, u64 as, u64 row_items, u64 out_row_bytes,
    const float* scales) {
  const device::Table t = *table;
  const device::Misses m = *misses;
  const gids::RowCopy copy{as, row_items, out_row_bytes, scales, &counters->overflowed};
  const u64 size = round_size(*counters, first, round_max);
  for (u64 i = warp_index(); i < size; i += warp_count()) {
    const u64 page = m.requests[first + i];
    const u32 line = m.lines[first + i];
    const bool bypassed = line == device::bypassed;
    if (!answer || gids::queue::outcome(answer, number, i) != 0) {
      if (lane() != 0) continue;
      if (!bypassed) {
        word::fail(t.words[page], line);
        t.owners[line] = 0;
      }
      m.lines[first + i] = device::failed;
      if (answer) local_ref<u64>(counters->failures).fetch_add(1, gids::memory_order_relaxed);
      continue;
    }
    const u64 from = address(pages + i * t.page_bytes);
    if (bypassed) {
      for (u32 row = m.first_rows[m.set.find(page)]; row != device::no_row; row = m.next_rows[row])
        gids::copy_row(from + t.offset_in_page(ids[row]), out + row * out_row_bytes, copy);
      continue;
    }
    gids::copy_rows(gids::Same<gids::Bytes16>{}, from, t.line(line), 1, static_cast<u32>(t.page_bytes / 16), lane());
    __syncwarp();  // the lanes' stores come before lane 0's release
    if (lane() == 0) word::publish(t.words[page]);
  }
}

// Rows that are in lines in host memory: bounded by the bus, so that a few blocks do.
extern "C" __global__ __launch_bounds__(256, 4) void gids_gather_host_lines(const device::Table* table,
                                                                            device::Counters* counters, const i64* ids,
                                                                            u64 n, u8* out, u64 as, u64 row_items,
                                                                            u64 out_row_bytes, const float* scales) {
  const device::Table t = *table;
  gather_rows(n, out, gids::RowCopy{as, row_items, out_row_bytes, scales, &counters->overflowed}, [&](u64 i) -> u64 {
    if (!t.holds(ids[i])) return 0;
    const u64 w = t.words[t.page_of(ids[i])];
    if (word::state_of(w) != gids::PageState::resident || word::line_of(w) < t.device_lines) return 0;
    return address(t.line(word::line_of(w))) + t.offset_in_page(ids[i]);
  });
}

// Copies all rows that are in lines in device memory. It trusts the word, not the plan: it copies from the line that
// the word names, if the word is RESIDENT; gids_gather_host_lines copies the rows of the other lines. misses: of the
// step, whose bypassed pages' rows were copied from their rounds; or null. Rows found in neither are counted, and their
// positions go to left[] if it is not null.
extern "C" __global__ __launch_bounds__(256, 4) void gids_gather_lines(
    const device::Table* table, device::Counters* counters, const device::Misses* misses, const i64* ids, u64 n,
    u8* out, u64 as, u64 row_items, u64 out_row_bytes, const float* scales, i64* left) {
  const device::Table t = *table;
  gather_rows(n, out, gids::RowCopy{as, row_items, out_row_bytes, scales, &counters->overflowed}, [&](u64 i) -> u64 {
    const i64 id = ids[i];
    if (!t.holds(id)) {
      atomicMax(&counters->bad, ~i);
      return 0;
    }
    const u64 page = t.page_of(id);
    const u64 w = t.words[page];  // an acquiring load would empty the nearest cache
    if (word::state_of(w) == gids::PageState::resident)
      return word::line_of(w) < t.device_lines ? address(t.line(word::line_of(w))) + t.offset_in_page(id) : 0;
    if (misses) {
      const u64 cell = misses->set.find(page);
      if (cell != gids::PageSet::none) {
        const u32 index = misses->set.values[cell];
        if (index != device::bypassed && misses->lines[index] == device::bypassed) return 0;
      }
    }
    const u64 k = local_ref<u64>(counters->unresolved).fetch_add(1, gids::memory_order_relaxed);
    if (left) left[k] = static_cast<i64>(i);
    return 0;
  });
}
