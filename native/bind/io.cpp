// Python's view of the I/O engines. Called by module.cpp; the cache's binding passes Engine on.
#include <algorithm>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "bind/signals.h"
#include "io/engine.h"
#include "io/file.h"

namespace nb = nanobind;

namespace gids {
namespace {

using Files = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Offsets = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FlatOut = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Errors = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

class ErrorsBatch final : public io::Batch {
 public:
  explicit ErrorsBatch(int32_t* errors) : errors_(errors) {}
  void done(const io::Read& read, const std::byte*, int error) noexcept override { errors_[read.cookie] = error; }

 private:
  int32_t* errors_;
};

// Reads what read_of(i) says for each i below n, and waits.
template <class F>
void read_each(io::Engine& engine, size_t n, const Errors& errors, const F& read_of) {
  auto batch = std::make_shared<ErrorsBatch>(errors.data());
  nb::gil_scoped_release release;
  batch->reads.resize(n);
  for (size_t i = 0; i < n; ++i) batch->reads[i] = read_of(i);
  engine.submit(batch);
  engine.wait(*batch, heed_signals);
}

void read(io::Engine& engine, Files files, Offsets offsets, Out out, Errors errors) {
  const size_t n = files.shape(0);
  if (offsets.shape(0) != n || out.shape(0) != n || errors.shape(0) != n)
    throw std::invalid_argument("Engine.read: files, offsets, out and errors differ in length: " + std::to_string(n) +
                                ", " + std::to_string(offsets.shape(0)) + ", " + std::to_string(out.shape(0)) + ", " +
                                std::to_string(errors.shape(0)));
  const size_t bytes = out.shape(1);
  if (bytes > ~0u) throw std::invalid_argument("Engine.read: a row of out has 4 GiB or more");
  if (n == 0 || bytes == 0) {
    std::fill_n(errors.data(), n, 0);
    return;
  }
  read_each(engine, n, errors, [&](size_t i) -> io::Read {
    if (offsets.data()[i] < 0)
      throw std::invalid_argument("Engine.read: offsets[" + std::to_string(i) +
                                  "] is negative: " + std::to_string(offsets.data()[i]));
    return {static_cast<u64>(offsets.data()[i]), reinterpret_cast<std::byte*>(out.data()) + i * bytes,
            static_cast<u32>(bytes), files.data()[i], i};
  });
}

// Reads each extent to its own offset in a flat buffer: Engine.read for extents of different lengths.
void read_extents(io::Engine& engine, Files files, Offsets offsets, Offsets lengths, FlatOut out, Offsets out_offsets,
                  Errors errors) {
  const size_t n = files.shape(0);
  if (offsets.shape(0) != n || lengths.shape(0) != n || out_offsets.shape(0) != n || errors.shape(0) != n)
    throw std::invalid_argument(
        "Engine.read_extents: files, offsets, lengths, out_offsets and errors differ in length");
  if (n == 0) return;
  const int64_t size = static_cast<int64_t>(out.shape(0));
  read_each(engine, n, errors, [&](size_t i) -> io::Read {
    const int64_t offset = offsets.data()[i], length = lengths.data()[i], out_offset = out_offsets.data()[i];
    if (offset < 0 || out_offset < 0 || length < 1 || length > INT32_MAX || length > size - out_offset)
      throw std::invalid_argument("Engine.read_extents: extent " + std::to_string(i) + " (" + std::to_string(length) +
                                  " B at " + std::to_string(offset) + ") does not fit at " +
                                  std::to_string(out_offset) + " of " + std::to_string(size) + " B");
    return {static_cast<u64>(offset), reinterpret_cast<std::byte*>(out.data()) + out_offset, static_cast<u32>(length),
            files.data()[i], i};
  });
}

nb::dict stats(const io::Engine& engine) {
  const io::Stats s = engine.stats();
  nb::dict d;
  d["reads"] = s.reads;
  d["requests"] = s.requests;
  d["bytes_asked"] = s.bytes_asked;
  d["bytes_read"] = s.bytes_read;
  d["errors"] = s.errors;
  d["retries"] = s.retries;
  d["busy_s"] = static_cast<double>(s.busy_ns) * 1e-9;
  d["latency_s"] = s.requests ? static_cast<double>(s.latency_ns) * 1e-9 / static_cast<double>(s.requests) : 0.0;
  d["depth_max"] = s.depth_max;
  d["threads"] = s.threads;
  d["in_flight"] = s.in_flight;
  return d;
}

// (seconds below which each bucket's requests took, how many of them there were)
std::tuple<std::vector<double>, std::vector<u64>> latencies(const io::Engine& engine) {
  const auto counts = engine.latencies();
  std::vector<double> ends(counts.size());
  for (u32 i = 0; i < ends.size(); ++i) ends[i] = static_cast<double>(io::LatencyHistogram::end_of(i)) * 1e-9;
  return {std::move(ends), {counts.begin(), counts.end()}};
}

void inject_faults(io::Engine& engine, const std::vector<std::tuple<u32, u64, int, u32>>& faults) {
  std::vector<io::Fault> list;
  for (const auto& [file, offset, error, times] : faults) list.push_back({file, offset, error, times});
  engine.inject_faults(std::move(list));
}

std::shared_ptr<io::Engine> open_engine(const std::string& kind, const std::vector<std::filesystem::path>& paths,
                                        u32 depth, u32 threads, u32 rings, u32 most_rings, bool direct,
                                        u32 max_read_bytes, u32 max_merge_bytes, std::vector<int> descriptors) {
  return io::open_engine(kind, {paths.begin(), paths.end()},
                         {depth, threads, max_read_bytes, max_merge_bytes, direct, rings, most_rings,
                          std::move(descriptors)});
}

// (file system, alignment) of a file opened for direct I/O or not.
std::tuple<std::string, u32> probe_file(const std::filesystem::path& path, bool direct) {
  const io::File file(path.string(), direct);
  return {io::file_system_name(file.fd()), file.alignment()};
}

}  // namespace

void bind_io(nb::module_& m) {
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const std::system_error& e) {  // OSError picks the subclass: FileNotFoundError, PermissionError, …
      const auto text = nb::steal(PyUnicode_DecodeFSDefault(e.what()));  // it may name a path, of any bytes
      PyErr_SetObject(PyExc_OSError, nb::make_tuple(e.code().value(), text).ptr());
    }
  });

  nb::class_<io::Engine>(m, "Engine")
      .def_prop_ro("name", [](const io::Engine& e) { return e.name(); })
      .def_prop_ro("note", &io::Engine::note)
      .def_prop_ro("alignment", &io::Engine::alignment)
      .def_prop_ro("depth", &io::Engine::depth)
      .def_prop_ro("max_read_bytes", &io::Engine::max_read_bytes)
      .def_prop_ro("bounce_bytes", &io::Engine::bounce_bytes)
      .def("read", &read, nb::arg("files").noconvert(), nb::arg("offsets").noconvert(), nb::arg("out").noconvert(),
           nb::arg("errors").noconvert())
      .def("read_extents", &read_extents, nb::arg("files").noconvert(), nb::arg("offsets").noconvert(),
           nb::arg("lengths").noconvert(), nb::arg("out").noconvert(), nb::arg("out_offsets").noconvert(),
           nb::arg("errors").noconvert())
      .def("stats", &stats)
      .def("latencies", &latencies)
      .def("inject_faults", &inject_faults, nb::arg("faults"))
      .def("close", &io::Engine::close, nb::call_guard<nb::gil_scoped_release>());

  m.def("open_engine", &open_engine, nb::arg("kind"), nb::arg("paths"), nb::kw_only(), nb::arg("depth"),
        nb::arg("threads"), nb::arg("rings"), nb::arg("most_rings"), nb::arg("direct"),
        nb::arg("max_read_bytes"), nb::arg("max_merge_bytes"),
        nb::arg("descriptors") = std::vector<int>(), nb::call_guard<nb::gil_scoped_release>());
  m.def("probe_file", &probe_file, nb::arg("path"), nb::kw_only(), nb::arg("direct"));
  m.attr("IO_THREADS_MAX") = u32{io::threads_max};
  m.def("why_no_uring", &io::why_no_uring);
}

}  // namespace gids
