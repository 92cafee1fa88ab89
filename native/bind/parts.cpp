// gids._core: the rows that a part of a dataset holds, and dividing nodes into parts. Every call releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "bind/bind.h"
#include "bind/guarded.h"
#include "store/held_rows.h"
#include "store/pack_parts.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gids {
namespace {

using store::HeldRows;
template <class T> using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

static_assert(sizeof(i64) == sizeof(int64_t));
const i64* ours(const int64_t* data) { return reinterpret_cast<const i64*>(data); }
const int* ours(const int32_t* data) { return data; }
i64* ours(int64_t* data) { return reinterpret_cast<i64*>(data); }

nb::object position_or_none(size_t at, size_t n) { return at == n ? nb::object(nb::none()) : nb::cast(at); }

template <class Owner>
void add_owned(HeldRows& rows, In<Owner> owners, uint64_t first, uint32_t part) {
  if (rows.sealed()) throw std::invalid_argument("the set is sealed");
  if (first > rows.id_count() || owners.size() > rows.id_count() - first)
    throw std::invalid_argument("owners of ids that are out of range");
  nb::gil_scoped_release unlocked;
  guarded([&] {
    rows.add_owned(owners.data(), owners.size(), first, part);
    return 0;
  });
}

template <class Id>
nb::object add(HeldRows& rows, In<Id> ids) {
  if (rows.sealed()) throw std::invalid_argument("the set is sealed");
  size_t at;
  {
    nb::gil_scoped_release unlocked;
    at = guarded([&] { return rows.add(ours(ids.data()), ids.size()); });
  }
  return position_or_none(at, ids.size());
}

nb::object positions_of(const HeldRows& rows, In<int64_t> ids, Out<int64_t> out) {
  if (!rows.sealed()) throw std::invalid_argument("a set has positions once it is sealed");
  if (ids.size() != out.size()) throw std::invalid_argument("positions_of: ids and out differ in length");
  size_t at;
  {
    nb::gil_scoped_release unlocked;
    at = rows.positions_of(ours(ids.data()), ids.size(), ours(out.data()));
  }
  return position_or_none(at, ids.size());
}

using Weights = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Loads = nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void expect(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

void add_weights(In<uint32_t> labels, In<float> values, uint64_t load,
                 nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> weights) {
  expect(labels.size() == values.size() && load < weights.shape(1),
         "add_weights: lengths differ, or load is out of range");
  nb::gil_scoped_release unlocked;
  for (size_t i = 0; i < labels.size(); ++i)
    expect(labels.data()[i] < weights.shape(0), "add_weights: a label is out of range");
  store::add_weights(labels.data(), values.data(), labels.size(), load, weights.shape(1), weights.data());
}

void expect_loads(const Weights& weights, const In<double>& totals, const Loads& loads, const Out<uint16_t>& parts) {
  const size_t count = totals.size();
  expect(weights.shape(1) == count && loads.shape(1) == count,
         "weights, totals and loads differ in the number of loads");
  expect(weights.shape(0) == parts.size(), "weights and parts differ in length");
  expect(loads.shape(0) > 0 && loads.shape(0) < store::no_part, "there must be 1 to 65534 parts");
}

void pack(In<uint32_t> order, Weights weights, In<double> totals, double most, Loads loads, Out<uint16_t> parts) {
  expect_loads(weights, totals, loads, parts);
  nb::gil_scoped_release unlocked;
  for (size_t i = 0; i < order.size(); ++i) expect(order.data()[i] < parts.size(), "pack: an item is out of range");
  store::pack(order.data(), order.size(), weights.data(), {totals.data(), totals.size()}, most,
              static_cast<u32>(loads.shape(0)), loads.data(), parts.data());
}

template <class Index>
size_t refine(In<int64_t> indptr, In<Index> indices, Weights weights, In<double> totals, double most, Loads loads,
              Out<uint16_t> parts) {
  expect_loads(weights, totals, loads, parts);
  expect(indptr.size() == parts.size() + 1, "refine: indptr must have one entry more than parts");
  size_t moved;
  {
    nb::gil_scoped_release unlocked;
    for (size_t i = 0; i < parts.size(); ++i)
      expect(parts.data()[i] < loads.shape(0), "refine: a part is out of range");
    moved = store::refine(ours(indptr.data()), ours(indices.data()), indices.size(), parts.size(), weights.data(),
                          {totals.data(), totals.size()}, most, static_cast<u32>(loads.shape(0)), loads.data(),
                          parts.data());
  }
  expect(moved != ~size_t{0}, "the topology is damaged: indptr falls, or an index names no node");
  return moved;
}

}  // namespace

void bind_parts(nb::module_& m) {
  m.attr("NO_PART") = store::no_part;
  m.def("add_weights", &add_weights, "labels"_a.noconvert(), "values"_a.noconvert(), "load"_a, "weights"_a.noconvert(),
        "weights[labels[i], load] += values[i].");
  m.def("pack", &pack, "order"_a.noconvert(), "weights"_a.noconvert(), "totals"_a.noconvert(), "most"_a,
        "loads"_a.noconvert(), "parts"_a.noconvert(),
        "Give each item in turn to the part that is best for the balance of all loads.");
  m.def(
      "refine", &refine<int32_t>, "indptr"_a.noconvert(), "indices"_a.noconvert(), "weights"_a.noconvert(),
      "totals"_a.noconvert(), "most"_a, "loads"_a.noconvert(), "parts"_a.noconvert(),
      "Each node moves to the part of most of its in-neighbors, if the loads there allow it. Returns how many moved.");
  m.def("refine", &refine<int64_t>, "indptr"_a.noconvert(), "indices"_a.noconvert(), "weights"_a.noconvert(),
        "totals"_a.noconvert(), "most"_a, "loads"_a.noconvert(), "parts"_a.noconvert());
  nb::class_<HeldRows>(m, "HeldRows", "The ids of the rows that a part of a dataset holds.")
      .def(nb::init<uint64_t>(), "id_count"_a)
      .def("add_owned", &add_owned<uint8_t>, "owners"_a.noconvert(), "first"_a, "part"_a,
           "Add the ids first + i with owners[i] == part. owners: uint8 or uint16.")
      .def("add_owned", &add_owned<uint16_t>, "owners"_a.noconvert(), "first"_a, "part"_a)
      .def("add", &add<int32_t>, "ids"_a.noconvert(),
           "Add ids, int32 or int64. Returns None, or the position of the first that is out of range or repeated.")
      .def("add", &add<int64_t>, "ids"_a.noconvert())
      .def("seal",
           [](HeldRows& rows) {
             nb::gil_scoped_release unlocked;
             if (!rows.seal()) throw std::invalid_argument("a part can hold at most 2^32 - 1 rows of a table");
           },
           "End of adding: only now are there positions.")
      .def("positions_of", &positions_of, "ids"_a.noconvert(), "out"_a.noconvert(),
           "out[i] = the number of held ids below ids[i]. Returns None, or the position of the first id not held.")
      .def("ids",
           [](const HeldRows& rows, Out<int64_t> out) {
             if (out.size() != rows.size()) throw std::invalid_argument("ids: out needs one place for each held id");
             nb::gil_scoped_release unlocked;
             rows.ids(ours(out.data()));
           },
           "out"_a.noconvert(), "Write the held ids, ascending, to out, int64[len(self)].")
      .def("__len__", &HeldRows::size)
      .def_prop_ro("nbytes", &HeldRows::bytes);
}

}  // namespace gids
