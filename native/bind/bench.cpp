// gids._core: what gids.bench asks of a trace. Checks types and shapes by signature, releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>

#include "bind/bind.h"
#include "cache/optimum.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gids {
namespace {

using Numbers = nb::ndarray<const i64, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<i64, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Marks = nb::ndarray<u32, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Uses = nb::ndarray<const u32, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

u64 unique_pages(const Numbers& ids, u32 rows_per_page, const Marks& marks, u32 mark, const Out& out) {
  if (out.size() < ids.size()) throw std::invalid_argument("unique_pages: out is shorter than ids");
  if (rows_per_page == 0) throw std::invalid_argument("unique_pages: rows_per_page is 0");
  nb::gil_scoped_release release;
  return cache::unique_pages({ids.data(), ids.size()}, rows_per_page, {marks.data(), marks.size()}, mark, out.data());
}

void min_hits(const Uses& next, const Numbers& ends, u64 lines, u64 warm, const Out& hits) {
  nb::gil_scoped_release release;
  cache::min_hits({next.data(), next.size()}, {ends.data(), ends.size()}, lines, warm, {hits.data(), hits.size()});
}

}  // namespace

void bind_bench(nb::module_& m) {
  m.def("unique_pages", &unique_pages, "ids"_a.noconvert(), "rows_per_page"_a, "marks"_a.noconvert(), "mark"_a,
        "out"_a.noconvert());
  m.def("min_hits", &min_hits, "next"_a.noconvert(), "ends"_a.noconvert(), "lines"_a, "warm"_a, "hits"_a.noconvert());
}

}  // namespace gids
