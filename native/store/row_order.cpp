// Row orders: one pass over ids or edges each. Where passes jump about in an array, they ask for it ahead.
#include "store/row_order.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "gids/mix.h"

namespace gids::store {

namespace {

constexpr size_t ahead = 16;   // how far to prefetch
constexpr size_t voters = 64;  // in-neighbors that vote, at most

}  // namespace

template <class Position>
void to_positions(const Position* order, u64 row_count, const i64* ids, size_t n, i64* out) noexcept {
  for (size_t i = 0; i < n; ++i) {
    if (i + ahead < n && static_cast<u64>(ids[i + ahead]) < row_count) __builtin_prefetch(order + ids[i + ahead]);
    const i64 id = ids[i];
    out[i] = static_cast<u64>(id) < row_count ? static_cast<i64>(order[id]) : id;
  }
}
template void to_positions<int>(const int*, u64, const i64*, size_t, i64*) noexcept;
template void to_positions<long>(const long*, u64, const i64*, size_t, i64*) noexcept;

template <class Position>
size_t sum_by_page(const Position* order, const float* weights, size_t n, u64 rows_per_page, float* sums,
                   size_t page_count) noexcept {
  for (size_t i = 0; i < n; ++i) {
    const u64 page = static_cast<u64>(static_cast<i64>(order[i])) / rows_per_page;
    if (page >= page_count) return i;
    sums[page] += weights[i];
  }
  return n;
}
template size_t sum_by_page<int>(const int*, const float*, size_t, u64, float*, size_t) noexcept;
template size_t sum_by_page<long>(const long*, const float*, size_t, u64, float*, size_t) noexcept;

template <class Position>
size_t mark_positions(const Position* order, size_t n, i64 row_count, i64 first, size_t count, u8* marks) noexcept {
  for (size_t i = 0; i < n; ++i) {
    const i64 position = order[i];
    if (position < 0 || position >= row_count) return i;
    const u64 slot = static_cast<u64>(position - first);  // wraps below first, and is then too large
    if (slot < count && marks[slot]++) return i;
  }
  return n;
}
template size_t mark_positions<int>(const int*, size_t, i64, i64, size_t, u8*) noexcept;
template size_t mark_positions<long>(const long*, size_t, i64, i64, size_t, u8*) noexcept;

template <class Index>
size_t propagate_labels(const i64* indptr, const Index* indices, size_t edge_count, size_t node_count, u32* labels,
                        u32* sizes, u32 most, u64 seed) {
  size_t moved = 0;
  u32 found[voters];
  for (size_t v = 0; v < node_count; ++v) {
    const i64 begin = indptr[v], end = indptr[v + 1];
    if (begin < 0 || end < begin || static_cast<u64>(end) > edge_count) return bad_topology;
    const size_t degree = static_cast<size_t>(end - begin), stride = degree > voters ? degree / voters : 1;
    size_t n = 0;
    for (i64 at = begin; at < end && n < voters; at += static_cast<i64>(stride)) {
      const u64 source = static_cast<u64>(static_cast<i64>(indices[at]));
      if (source >= node_count) return bad_topology;
      found[n++] = labels[source];
    }
    if (n == 0) continue;
    std::sort(found, found + n);
    const u32 own = labels[v];
    u32 best = own;
    size_t best_votes =
        static_cast<size_t>(std::upper_bound(found, found + n, own) - std::lower_bound(found, found + n, own));
    for (size_t i = 0; i < n;) {
      const u32 label = found[i];
      size_t stop = i + 1;
      while (stop < n && found[stop] == label) ++stop;
      const size_t votes = stop - i;
      i = stop;
      if (label == own || votes < best_votes || sizes[label] >= most) continue;
      // Of equals the own one stays; else chance decides, the same chance in every run.
      if (votes == best_votes && (best == own || mix(label ^ seed) >= mix(best ^ seed))) continue;
      best = label;
      best_votes = votes;
    }
    if (best == own) continue;
    --sizes[own];
    ++sizes[best];
    labels[v] = best;
    ++moved;
  }
  return moved;
}
template size_t propagate_labels<int>(const i64*, const int*, size_t, size_t, u32*, u32*, u32, u64);
template size_t propagate_labels<long>(const i64*, const long*, size_t, size_t, u32*, u32*, u32, u64);

template <class Index>
size_t adopt_lone(const i64* indptr, const Index* indices, size_t edge_count, size_t node_count, u32* labels,
                  u32* sizes, u32 most) noexcept {
  size_t adopted = 0;
  for (size_t v = 0; v < node_count; ++v) {
    const i64 begin = indptr[v], end = indptr[v + 1];
    if (begin < 0 || end < begin || static_cast<u64>(end) > edge_count) return bad_topology;
    for (i64 at = begin; at < end; ++at) {
      const u64 source = static_cast<u64>(static_cast<i64>(indices[at]));
      if (source >= node_count) return bad_topology;
      const u32 own = labels[source], other = labels[v];
      if (own == other || sizes[own] != 1 || sizes[other] >= most) continue;
      --sizes[own];
      ++sizes[other];
      labels[source] = other;
      ++adopted;
    }
  }
  return adopted;
}
template size_t adopt_lone<int>(const i64*, const int*, size_t, size_t, u32*, u32*, u32) noexcept;
template size_t adopt_lone<long>(const i64*, const long*, size_t, size_t, u32*, u32*, u32) noexcept;

void by_weight(const u32* weights, size_t n, u32* nodes) {
  constexpr u32 heaviest = 65535;
  std::vector<size_t> starts(heaviest + 2);
  for (size_t i = 0; i < n; ++i) ++starts[heaviest - std::min(weights[i], heaviest) + 1];
  for (size_t w = 0; w <= heaviest; ++w) starts[w + 1] += starts[w];
  for (size_t i = 0; i < n; ++i) nodes[starts[heaviest - std::min(weights[i], heaviest)]++] = static_cast<u32>(i);
}

template <class Position>
void place_in_clusters(const u32* nodes, size_t n, const u32* labels, const u32* ranks, u64* starts,
                       Position* order) noexcept {
  for (size_t i = 0; i < n; ++i) {
    if (i + ahead < n) __builtin_prefetch(labels + nodes[i + ahead]);
    order[nodes[i]] = static_cast<Position>(starts[ranks[labels[nodes[i]]]]++);
  }
}
template void place_in_clusters<int>(const u32*, size_t, const u32*, const u32*, u64*, int*) noexcept;
template void place_in_clusters<long>(const u32*, size_t, const u32*, const u32*, u64*, long*) noexcept;

int scatter_rows(int fd, const std::byte* rows, size_t row_bytes, const i64* positions, size_t n, u64 bucket_rows,
                 u64 row_count, u64* filled) {
  const size_t record_bytes = slot_bytes + row_bytes, bucket_count = (row_count + bucket_rows - 1) / bucket_rows;
  std::vector<size_t> ends(bucket_count + 1);
  for (size_t i = 0; i < n; ++i) {
    if (static_cast<u64>(positions[i]) >= row_count) return EINVAL;
    ++ends[static_cast<u64>(positions[i]) / bucket_rows + 1];
  }
  for (size_t b = 0; b < bucket_count; ++b) {
    const u64 room = std::min(bucket_rows, row_count - b * bucket_rows);
    if (filled[b] + ends[b + 1] > room) return EINVAL;
    ends[b + 1] += ends[b];
  }
  // ends[b] walks from where its records begin to where the next bucket's do.
  std::vector<std::byte> records(n * record_bytes);
  for (size_t i = 0; i < n; ++i) {
    const u64 bucket = static_cast<u64>(positions[i]) / bucket_rows;
    const u32 slot = static_cast<u32>(static_cast<u64>(positions[i]) % bucket_rows);
    std::byte* to = records.data() + ends[bucket]++ * record_bytes;
    std::memcpy(to, &slot, slot_bytes);
    std::memcpy(to + slot_bytes, rows + i * row_bytes, row_bytes);
  }
  size_t begin = 0;
  for (size_t b = 0; b < bucket_count; ++b) {
    const std::byte* from = records.data() + begin * record_bytes;
    size_t left = (ends[b] - begin) * record_bytes;
    off_t at = static_cast<off_t>((b * bucket_rows + filled[b]) * record_bytes);
    while (left) {
      const ssize_t written = pwrite(fd, from, left, at);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) return errno;
      from += written;
      at += written;
      left -= static_cast<size_t>(written);
    }
    filled[b] += ends[b] - begin;
    begin = ends[b];
  }
  return 0;
}

bool place_rows(const std::byte* records, size_t n, size_t row_bytes, std::byte* out) {
  std::vector<bool> there(n);
  for (size_t i = 0; i < n; ++i) {
    const std::byte* record = records + i * (slot_bytes + row_bytes);
    u32 slot;
    std::memcpy(&slot, record, slot_bytes);
    if (slot >= n || there[slot]) return false;
    there[slot] = true;
    std::memcpy(out + size_t{slot} * row_bytes, record + slot_bytes, row_bytes);
  }
  return true;
}

}  // namespace gids::store
