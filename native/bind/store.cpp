// gids._core: checksums, and passes over edges. Every call here releases the GIL and keeps nothing.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/filesystem.h>

#include <cstdint>
#include <filesystem>
#include <optional>

#include "bind/bind.h"
#include "bind/guarded.h"
#include "store/crc32c.h"
#include "store/topology.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gids {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Pages = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Shares = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Visits = nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutIds = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class Index> using Indices = nb::ndarray<const Index, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

static_assert(sizeof(i64) == sizeof(int64_t));
const i64* ids_of(const Ids& a) { return reinterpret_cast<const i64*>(a.data()); }
i64* ids_of(const OutIds& a) { return reinterpret_cast<i64*>(a.data()); }
const std::byte* bytes_of(const uint8_t* data) { return reinterpret_cast<const std::byte*>(data); }

nb::object position_or_none(size_t at) { return at == store::all_in_range ? nb::object(nb::none()) : nb::cast(at); }

auto crc32c_pages(Pages pages) {
  const size_t count = pages.shape(0), page_bytes = pages.shape(1);
  auto* out = new uint32_t[count ? count : 1];
  nb::capsule owner(out, [](void* p) noexcept { delete[] static_cast<uint32_t*>(p); });
  {
    nb::gil_scoped_release unlocked;
    store::crc32c_pages(bytes_of(pages.data()), count, page_bytes, out);
  }
  return nb::ndarray<nb::numpy, uint32_t, nb::ndim<1>>(out, {count}, owner);
}

uint32_t crc32c_extend(uint32_t crc, Bytes data) {
  nb::gil_scoped_release unlocked;
  return store::crc32c(bytes_of(data.data()), data.size(), crc);
}

uint32_t crc32c_portable(uint32_t crc, Bytes data) {
  nb::gil_scoped_release unlocked;
  return store::crc32c_portable(bytes_of(data.data()), data.size(), crc);
}

template <class Index>
nb::object count_sources(Indices<Index> indices, int64_t limit, int64_t first, Words counts) {
  size_t bad;
  {
    nb::gil_scoped_release unlocked;
    bad = guarded([&] {
      return store::count_sources(indices.data(), indices.size(), limit, first, counts.size(), counts.data());
    });
  }
  return position_or_none(bad);
}

nb::object sort_edges(Ids sources, Ids destinations, Ids ids, int64_t first, OutIds offsets, OutIds sorted_sources,
                      OutIds sorted_ids) {
  const size_t n = sources.size();
  if (destinations.size() != n || ids.size() != n || sorted_sources.size() != n || sorted_ids.size() != n)
    throw nb::value_error("sort_edges: sources, destinations, ids and the outputs differ in length");
  if (offsets.size() == 0) throw nb::value_error("sort_edges: offsets is empty; it needs one entry more than nodes");
  size_t bad;
  {
    nb::gil_scoped_release unlocked;
    bad = store::sort_edges(ids_of(sources), ids_of(destinations), ids_of(ids), n, first, offsets.size() - 1,
                            ids_of(offsets), ids_of(sorted_sources), ids_of(sorted_ids));
  }
  return position_or_none(bad);
}

void sort_neighbors(Ids offsets, OutIds sources, OutIds ids) {
  const size_t count = offsets.size() ? offsets.size() - 1 : 0;
  const i64* at = ids_of(offsets);
  if (ids.size() != sources.size()) throw nb::value_error("sort_neighbors: sources and ids differ in length");
  for (size_t slot = 0; slot < count; ++slot)
    if (at[slot] < 0 || at[slot + 1] < at[slot] || static_cast<size_t>(at[slot + 1]) > sources.size())
      throw nb::value_error("sort_neighbors: offsets fall, or leave the edges");
  nb::gil_scoped_release unlocked;
  store::sort_neighbors(at, count, ids_of(sources), ids_of(ids));
}

template <class Index>
nb::object carry_to_sources(Ids indptr, Indices<Index> indices, Shares shares, Visits visits) {
  if (indptr.size() != shares.size() + 1)
    throw nb::value_error("carry_to_sources: indptr must have one entry more than shares");
  size_t bad;
  {
    nb::gil_scoped_release unlocked;
    bad = guarded([&] {
      return store::carry_to_sources(ids_of(indptr), shares.size(), indices.data(), indices.size(), shares.data(),
                                     visits.data(), visits.size());
    });
  }
  if (bad == store::bad_indptr) throw nb::value_error("indptr decreases or exceeds the indices");
  return position_or_none(bad);
}

// A guard of the block of a with statement, in this thread.
class BlockGuard {
 public:
  void enter() {
    store::MapGuard::prepare();
    guard_.emplace();
  }
  // Does not hide an OSError, which may be that of a guard inside.
  void exit(nb::handle error) {
    if (guard_ && guard_->failed() && !PyErr_GivenExceptionMatches(error.ptr(), PyExc_OSError)) {
      try {
        guard_->raise();
      } catch (...) {
        guard_.reset();
        throw;
      }
    }
    guard_.reset();
  }

 private:
  std::optional<store::MapGuard> guard_;
};

void bind_mapped_files(nb::module_& m) {
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const store::MapFault& fault) {
      const auto path = nb::steal(PyUnicode_DecodeFSDefault(fault.path.c_str()));
      const nb::object error =
          nb::module_::import_("gids.errors").attr("StorageError")(fault.error, fault.what(), path, fault.offset);
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    }
  });
  // An array, not a bound object: nanobind calls objects leaked that a framework keeps until the process ends.
  m.def("map_file",
        [](int fd, u64 bytes, const std::filesystem::path& path) {
          auto* file = new store::MappedFile(fd, bytes, path.string());
          const nb::capsule owner(file, [](void* p) noexcept { delete static_cast<store::MappedFile*>(p); });
          const auto* data = reinterpret_cast<const uint8_t*>(file->data());
          return nb::make_tuple(nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(data, {bytes}, owner), file->fd());
        },
        "fd"_a, "nbytes"_a, "path"_a,
        "The first bytes of a file, mapped for reading: (uint8[nbytes], a duplicate of fd, which is open while the "
        "array lives). path: for errors.");
  nb::class_<BlockGuard>(m, "MapGuard",
                         "Of a with statement: reads of mapped files that fail raise StorageError at its end.")
      .def(nb::init<>())
      .def("__enter__", [](BlockGuard& guard) { guard.enter(); })
      .def("__exit__", [](BlockGuard& guard, nb::handle error, nb::handle, nb::handle) { guard.exit(error); },
           "error"_a.none(), "value"_a.none(), "traceback"_a.none());
}

}  // namespace

void bind_store(nb::module_& m) {
  bind_mapped_files(m);
  m.def("crc32c", &crc32c_pages, "pages"_a.noconvert(),
        "CRC32C of each page. pages: uint8[n, page_bytes], C order. Returns uint32[n].");
  m.def("crc32c_extend", &crc32c_extend, "crc"_a, "data"_a.noconvert(),
        "CRC32C of the bytes that led to crc (0: none) followed by data, uint8[n].");
  m.def("crc32c_portable", &crc32c_portable, "crc"_a, "data"_a.noconvert(),
        "crc32c_extend without the processor's instruction, for comparison.");
  m.def("count_sources", &count_sources<int32_t>, "indices"_a.noconvert(), "limit"_a, "first"_a, "counts"_a.noconvert(),
        "Add to counts (uint32, saturating) how often each of first, first + 1, ... occurs in indices "
        "(int32 or int64). Returns None, or the position of the first index outside [0, limit).");
  m.def("count_sources", &count_sources<int64_t>, "indices"_a.noconvert(), "limit"_a, "first"_a,
        "counts"_a.noconvert());
  m.def("sort_edges", &sort_edges, "sources"_a.noconvert(), "destinations"_a.noconvert(), "ids"_a.noconvert(),
        "first"_a, "offsets"_a.noconvert(), "sorted_sources"_a.noconvert(), "sorted_ids"_a.noconvert(),
        "Stable sort of edges by destination, all in [first, first + len(offsets) - 1). Fills offsets and the "
        "sorted arrays. Returns None, or the position of the first destination out of range.");
  m.def("sort_neighbors", &sort_neighbors, "offsets"_a.noconvert(), "sources"_a.noconvert(), "ids"_a.noconvert(),
        "Sort the edges of each destination by source, stably and in place: destination v has those from "
        "offsets[v] to offsets[v + 1]. ValueError when offsets are none.");
  m.def("carry_to_sources", &carry_to_sources<int32_t>, "indptr"_a.noconvert(), "indices"_a.noconvert(),
        "shares"_a.noconvert(), "visits"_a.noconvert(),
        "Add shares[v] (float64) to visits[s] for each in-edge of destination v from source s; v has the edges "
        "indptr[v] to indptr[v + 1] of indices (int32 or int64). Returns None, or the position of the first "
        "source that visits has no place for; ValueError for a bad indptr.");
  m.def("carry_to_sources", &carry_to_sources<int64_t>, "indptr"_a.noconvert(), "indices"_a.noconvert(),
        "shares"_a.noconvert(), "visits"_a.noconvert());
}

}  // namespace gids
