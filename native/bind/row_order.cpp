// gids._core: orders of rows. Every call here releases the GIL and keeps nothing.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>

#include "bind/bind.h"
#include "bind/guarded.h"
#include "store/row_order.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gids {
namespace {

template <class T> using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using InRows = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutRows = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

static_assert(sizeof(i64) == sizeof(int64_t));
const i64* ours(const int64_t* data) { return reinterpret_cast<const i64*>(data); }
i64* ours(int64_t* data) { return reinterpret_cast<i64*>(data); }
u64* ours(uint64_t* data) { return reinterpret_cast<u64*>(data); }

void expect(bool holds, const char* what) {
  if (!holds) throw nb::value_error(what);
}

nb::object position_or_none(size_t at, size_t n) { return at == n ? nb::object(nb::none()) : nb::cast(at); }

template <class Position>
void to_positions(In<Position> order, In<int64_t> ids, Out<int64_t> out) {
  expect(out.size() == ids.size(), "to_positions: ids and out differ in length");
  nb::gil_scoped_release unlocked;
  guarded([&] {
    store::to_positions(order.data(), order.size(), ours(ids.data()), ids.size(), ours(out.data()));
    return 0;
  });
}

template <class Position>
nb::object sum_by_page(In<Position> order, In<float> weights, uint64_t rows_per_page, Out<float> sums) {
  expect(order.size() == weights.size() && rows_per_page > 0, "sum_by_page: order and weights differ in length");
  size_t at;
  {
    nb::gil_scoped_release unlocked;
    at = guarded([&] {
      return store::sum_by_page(order.data(), weights.data(), order.size(), rows_per_page, sums.data(), sums.size());
    });
  }
  return position_or_none(at, order.size());
}

template <class Position>
nb::object mark_positions(In<Position> order, int64_t row_count, int64_t first, Out<uint8_t> marks) {
  size_t at;
  {
    nb::gil_scoped_release unlocked;
    at = guarded([&] {
      return store::mark_positions(order.data(), order.size(), row_count, first, marks.size(), marks.data());
    });
  }
  return position_or_none(at, order.size());
}

size_t checked(size_t count) {
  expect(count != store::bad_topology, "the topology is damaged: indptr falls, or an index names no node");
  return count;
}

template <class Index>
size_t propagate_labels(In<int64_t> indptr, In<Index> indices, Out<uint32_t> labels, Out<uint32_t> sizes,
                        uint32_t most, uint64_t seed) {
  expect(indptr.size() == labels.size() + 1 && sizes.size() == labels.size(), "propagate_labels: lengths differ");
  size_t count;
  {
    nb::gil_scoped_release unlocked;
    count = guarded([&] {
      return store::propagate_labels(ours(indptr.data()), indices.data(), indices.size(), labels.size(), labels.data(),
                                     sizes.data(), most, seed);
    });
  }
  return checked(count);
}

template <class Index>
size_t adopt_lone(In<int64_t> indptr, In<Index> indices, Out<uint32_t> labels, Out<uint32_t> sizes, uint32_t most) {
  expect(indptr.size() == labels.size() + 1 && sizes.size() == labels.size(), "adopt_lone: lengths differ");
  size_t count;
  {
    nb::gil_scoped_release unlocked;
    count = guarded([&] {
      return store::adopt_lone(ours(indptr.data()), indices.data(), indices.size(), labels.size(), labels.data(),
                               sizes.data(), most);
    });
  }
  return checked(count);
}

void by_weight(In<uint32_t> weights, Out<uint32_t> nodes) {
  expect(weights.size() == nodes.size(), "by_weight: weights and nodes differ in length");
  nb::gil_scoped_release unlocked;
  store::by_weight(weights.data(), weights.size(), nodes.data());
}

template <class Position>
void place_in_clusters(In<uint32_t> nodes, In<uint32_t> labels, In<uint32_t> ranks, Out<uint64_t> starts,
                       Out<Position> order) {
  expect(nodes.size() == labels.size() && nodes.size() == order.size() && ranks.size() == labels.size(),
         "place_in_clusters: lengths differ");
  nb::gil_scoped_release unlocked;
  store::place_in_clusters(nodes.data(), nodes.size(), labels.data(), ranks.data(), ours(starts.data()),
                           order.data());
}

int scatter_rows(int fd, InRows rows, In<int64_t> positions, uint64_t bucket_rows, uint64_t row_count,
                 Out<uint64_t> filled) {
  expect(rows.shape(0) == positions.size(), "scatter_rows: rows and positions differ in length");
  expect(bucket_rows > 0 && bucket_rows <= UINT32_MAX && filled.size() == (row_count + bucket_rows - 1) / bucket_rows,
         "scatter_rows: one count for each bucket is needed");
  nb::gil_scoped_release unlocked;
  return store::scatter_rows(fd, reinterpret_cast<const std::byte*>(rows.data()), rows.shape(1), ours(positions.data()),
                             positions.size(), bucket_rows, row_count, ours(filled.data()));
}

bool place_rows(InRows records, OutRows out) {
  expect(records.shape(0) == out.shape(0) && records.shape(1) == out.shape(1) + store::slot_bytes,
         "place_rows: a record is a row and four bytes");
  nb::gil_scoped_release unlocked;
  return store::place_rows(reinterpret_cast<const std::byte*>(records.data()), records.shape(0), out.shape(1),
                           reinterpret_cast<std::byte*>(out.data()));
}

template <class Position> void bind_positions(nb::module_& m) {
  m.def("to_positions", &to_positions<Position>, "order"_a.noconvert(), "ids"_a.noconvert(), "out"_a.noconvert(),
        "out[i] = order[ids[i]]; an id out of range stays as it is. order: int32 or int64; ids, out: int64[n].");
  m.def("sum_by_page", &sum_by_page<Position>, "order"_a.noconvert(), "weights"_a.noconvert(), "rows_per_page"_a,
        "sums"_a.noconvert(),
        "Add each row's weight (float32) to the sum of the page that order puts it in. Returns None, or the first "
        "row whose page there is not.");
  m.def("mark_positions", &mark_positions<Position>, "order"_a.noconvert(), "row_count"_a, "first"_a,
        "marks"_a.noconvert(),
        "Mark (uint8) each position in [first, first + len(marks)). Returns None, or the first row whose position is "
        "out of range or marked already.");
  m.def("place_in_clusters", &place_in_clusters<Position>, "nodes"_a.noconvert(), "labels"_a.noconvert(),
        "ranks"_a.noconvert(), "starts"_a.noconvert(), "order"_a.noconvert(),
        "order[node] = the next place of cluster ranks[labels[node]], for nodes in turn. starts are advanced.");
}

template <class Index> void bind_edges(nb::module_& m) {
  m.def("propagate_labels", &propagate_labels<Index>, "indptr"_a.noconvert(), "indices"_a.noconvert(),
        "labels"_a.noconvert(), "sizes"_a.noconvert(), "most"_a, "seed"_a,
        "One round: each node takes the label of most of its in-neighbors, of clusters below `most` nodes. Returns "
        "how many moved. ValueError for a damaged topology.");
  m.def("adopt_lone", &adopt_lone<Index>, "indptr"_a.noconvert(), "indices"_a.noconvert(), "labels"_a.noconvert(),
        "sizes"_a.noconvert(), "most"_a,
        "Nodes that are alone join the cluster of a node that they point to. Returns how many.");
}

}  // namespace

void bind_row_order(nb::module_& m) {
  m.attr("SLOT_BYTES") = store::slot_bytes;
  bind_positions<int32_t>(m);
  bind_positions<int64_t>(m);
  bind_edges<int32_t>(m);
  bind_edges<int64_t>(m);
  m.def("by_weight", &by_weight, "weights"_a.noconvert(), "nodes"_a.noconvert(),
        "All nodes by falling weight, equals in their order. weights, nodes: uint32[n].");
  m.def("scatter_rows", &scatter_rows, "fd"_a, "rows"_a.noconvert(), "positions"_a.noconvert(), "bucket_rows"_a,
        "row_count"_a, "filled"_a.noconvert(),
        "Append rows (uint8[n, row_bytes]) to the buckets of their positions in a file. Returns 0 or errno.");
  m.def("place_rows", &place_rows, "records"_a.noconvert(), "out"_a.noconvert(),
        "Put a bucket's records in their places. Returns whether they were a whole bucket.");
}

}  // namespace gids
