// gids._core: the rows that a part of a dataset holds. Every call releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "bind/bind.h"
#include "bind/guarded.h"
#include "store/held_rows.h"

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

}  // namespace

void bind_parts(nb::module_& m) {
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
