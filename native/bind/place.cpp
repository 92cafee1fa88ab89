// gids._core: which devices hold which rows. Checks types and shapes by signature, releases the GIL, keeps nothing.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "distributed/place.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gids {
namespace {

template <class T> using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

u64* ours(uint64_t* data) { return reinterpret_cast<u64*>(data); }
u32* ours(uint32_t* data) { return data; }
u16* ours(uint16_t* data) { return data; }
u8* ours(uint8_t* data) { return data; }

template <class Heat> void by_heat(In<Heat> heat, Out<uint32_t> rows) {
  if (heat.size() != rows.size() || heat.size() > UINT32_MAX)
    throw nb::value_error("by_heat: heat and rows differ in length, or are longer than 2^32 - 1");
  nb::gil_scoped_release unlocked;
  distributed::by_heat(heat.data(), heat.size(), rows.data());
}

template <class Heat, class Mask>
std::pair<uint64_t, std::vector<double>> place(In<uint32_t> rows, In<Heat> heat, std::vector<uint64_t> capacities,
                                               std::pair<double, double> worth, Out<Mask> holders) {
  if (rows.size() != heat.size() || holders.size() != heat.size())
    throw nb::value_error("place: rows, heat and holders differ in length");
  if (capacities.empty() || capacities.size() > sizeof(Mask) * 8)
    throw nb::value_error("place: holders has fewer bits than there are devices, or there is none");
  for (size_t i = 0; i < rows.size(); ++i)
    if (rows.data()[i] >= rows.size()) throw nb::value_error("place: a row is out of range");
  std::vector<double> gained(capacities.size());
  nb::gil_scoped_release unlocked;
  const std::vector<u64> limits(capacities.begin(), capacities.end());
  const u64 exchanged = distributed::place(rows.data(), heat.data(), rows.size(), limits,
                                           {worth.first, worth.second}, ours(holders.data()), gained);
  return {exchanged, std::move(gained)};
}

template <class Heat> void bind_heat(nb::module_& m) {
  m.def("by_heat", &by_heat<Heat>, "heat"_a.noconvert(), "rows"_a.noconvert());
  const auto bind = [&](auto place) {
    m.def("place", place, "rows"_a.noconvert(), "heat"_a.noconvert(), "capacities"_a, "worth"_a,
          "holders"_a.noconvert());
  };
  bind(&place<Heat, uint8_t>);
  bind(&place<Heat, uint16_t>);
  bind(&place<Heat, uint32_t>);
  bind(&place<Heat, uint64_t>);
}

}  // namespace

void bind_place(nb::module_& m) {
  m.attr("MAX_DEVICES") = distributed::max_devices;
  bind_heat<float>(m);
  bind_heat<double>(m);
}

}  // namespace gids
