// gids._core: what gids.packs.annex is made of. Checks types and shapes by signature, releases the GIL around work and
// lets Ctrl-C through.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <optional>
#include <vector>

#include "bind/bind.h"
#include "bind/running.h"
#include "packs/annex_plan.h"
#include "packs/annex_sweep.h"
#include "packs/capacity.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gids {
namespace {

using packs::AnnexPlan;
using packs::AnnexSweep;
using packs::Uses;
using packs::Writer;

using RowIds = nb::ndarray<const u32, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Checksums = nb::ndarray<const u32, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Positions = nb::ndarray<i64, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T> using View = nb::ndarray<nb::numpy, const T, nb::ndim<1>>;
using RunningAnnexSweep = Running<AnnexSweep>;

// Calls heed_signals ten times a second at most.
class Signals {
 public:
  void operator()() {
    const auto now = std::chrono::steady_clock::now();
    if (now < next_) return;
    next_ = now + std::chrono::milliseconds(100);
    heed_signals();
  }

 private:
  std::chrono::steady_clock::time_point next_{};
};

u32 step_of(u64 step, u64 steps) {
  if (step >= steps)
    throw std::out_of_range("step " + std::to_string(step) + " of a superbatch of " + std::to_string(steps));
  return static_cast<u32>(step);
}

void read_positions(const Uses& uses, u64 step, i64 first_row, Positions out) {
  const u32 number = step_of(step, uses.steps());
  const u64 n = uses.size(number);
  if (out.size() != n) throw std::invalid_argument("out: expected " + std::to_string(n) + " positions");
  nb::gil_scoped_release release;
  std::vector<u32> slots(n);
  uses.read_rows(number, 0, slots);
  for (u64 i = 0; i < n; ++i) out.data()[i] = first_row + slots[i];
}

std::shared_ptr<AnnexPlan> plan_annex(Uses& uses, cache::Workers& workers, u64 row_count, u32 row_bytes,
                                      u32 page_bytes, u32 rows_per_page, u32 shard_count, u32 first_file,
                                      u64 capacity_rows, u32 group_bytes, u32 chunk_bytes) {
  const cache::Geometry geometry{row_count, row_bytes, page_bytes, rows_per_page, shard_count, first_file};
  nb::gil_scoped_release release;
  return packs::plan_annex(uses, geometry, {capacity_rows, group_bytes, chunk_bytes}, workers, Signals());
}

u64 capacity_for(const Uses& uses, cache::Workers& workers, u64 row_count, u32 row_bytes, u32 page_bytes,
                 u32 rows_per_page, u64 lines, u32 ahead, u32 group_bytes, u32 chunk_bytes) {
  const cache::Geometry geometry{row_count, row_bytes, page_bytes, rows_per_page, 1, 0};
  nb::gil_scoped_release release;
  return packs::capacity_for(uses, geometry, {0, group_bytes, chunk_bytes}, lines, ahead, workers, Signals());
}

template <class T>
View<T> view(const AnnexPlan& plan, const std::vector<T>& values, u64 begin, u64 end) {
  return View<T>(values.data() + begin, {end - begin}, nb::find(&plan));
}

void new_sweep(RunningAnnexSweep* self, std::shared_ptr<io::Engine> engine, std::shared_ptr<Writer> writer,
               std::shared_ptr<cache::Workers> workers, std::shared_ptr<AnnexPlan> plan, u32 chunks, u32 gap_bytes,
               u64 first_page, std::optional<Checksums> checksums) {
  packs::AnnexSweepOptions options{chunks, gap_bytes, first_page, {}};
  if (checksums) options.checksums = {checksums->data(), checksums->size()};
  std::vector<nb::object> kept;
  if (checksums) kept.push_back(nb::cast(*checksums));
  new (self) RunningAnnexSweep(std::move(kept), std::move(engine), std::move(writer), std::move(workers),
                               std::move(plan), options);
}

nb::dict result_of(const RunningAnnexSweep& sweep) {
  const AnnexSweep::Result& r = sweep->result();
  nb::dict d;
  d["error"] = r.error;
  d["in_table"] = r.failed == AnnexSweep::Failed::table;
  d["in_annex"] = r.failed == AnnexSweep::Failed::annex;
  d["file"] = r.file;
  d["offset"] = r.offset;
  d["bytes_read"] = r.bytes_read;
  d["bytes_written"] = r.bytes_written;
  d["busy_s"] = static_cast<double>(r.busy_ns) * 1e-9;
  return d;
}

}  // namespace

void bind_annex(nb::module_& m) {
  m.attr("ANNEX_MOST_STEPS") = packs::note::most_steps;
  m.attr("ANNEX_RANGES") = packs::ranges_max;

  nb::class_<Uses>(m, "RowUses", "The rows of a table that each minibatch of a superbatch uses, in a file.")
      .def("__init__", [](Uses*, int, u64) { throw nb::type_error("use RowUses.create"); })
      .def_static("create", [](int fd, u64 row_count) { return std::make_shared<Uses>(fd, row_count); }, "fd"_a,
                  "row_count"_a)
      .def("append",
           [](Uses& uses, const RowIds& rows) {
             nb::gil_scoped_release release;
             uses.append({rows.data(), rows.size()});
           },
           "rows"_a.noconvert(), "The rows of the next step, which may repeat.")
      .def("count", [](const Uses& uses, u64 step) { return uses.size(step_of(step, uses.steps())); }, "step"_a)
      .def("read_positions", &read_positions, "step"_a, "first_row"_a, "out"_a.noconvert(),
           "After plan_annex(): the positions of a step's rows, to int64[count(step)]. first_row: added to each.")
      .def("__len__", &Uses::steps)
      .def_prop_ro("uses", [](const Uses& uses) { return uses.size(); });

  nb::class_<AnnexPlan>(m, "AnnexPlan", "Which copies of rows an annex has, and how long they are used.")
      .def("__init__", [](AnnexPlan*) { throw nb::type_error("use plan_annex"); })
      .def("first_pages",
           [](const AnnexPlan& plan) { return view(plan, plan.first_page, 0, plan.first_page.size()); },
           "uint64[steps + 1]: the first page of each step's run, and the number of pages. A view.")
      .def("missed", [](const AnnexPlan& plan) { return view(plan, plan.missed, 0, plan.missed.size()); },
           "uint64[steps]: copies of each run. A view.")
      .def("deaths", [](const AnnexPlan& plan) { return view(plan, plan.page_dies, 0, plan.page_dies.size()); },
           "uint16[pages]: the last step that uses a row of each page. A view.")
      .def("dying",
           [](const AnnexPlan& plan, u64 step) {
             const u32 number = step_of(step, plan.steps);
             return view(plan, plan.dying, plan.dying_begin[number], plan.dying_begin[number + 1]);
           },
           "step"_a, "uint32[n]: pages of earlier runs that no later step uses. A view.")
      .def("lines_needed", &AnnexPlan::lines_needed, "ahead"_a,
           "The most lines that pages need if runs are read `ahead` steps before they are due.")
      .def_prop_ro("copies", [](const AnnexPlan& plan) { return plan.copies; })
      .def_prop_ro("once", [](const AnnexPlan& plan) { return plan.once; }, "Copies that one step uses.")
      .def_prop_ro("group_bytes",
                   [](const AnnexPlan& plan) { return plan.group_pages * plan.geometry.page_bytes; },
                   "Of a buffer that the sweep needs for each run, and for one more.")
      .def_prop_ro("nbytes", &AnnexPlan::bytes, "Of the annex.")
      .def_prop_ro("memory_bytes", &AnnexPlan::memory_bytes);

  m.def("plan_annex", &plan_annex, "uses"_a, "workers"_a, nb::kw_only(), "row_count"_a, "row_bytes"_a, "page_bytes"_a,
        "rows_per_page"_a, "shard_count"_a, "first_file"_a, "capacity_rows"_a, "group_bytes"_a, "chunk_bytes"_a,
        "Plans the copies for a cache of so many rows, and turns the uses into positions.");

  m.def("annex_capacity", &capacity_for, "uses"_a, "workers"_a, nb::kw_only(), "row_count"_a, "row_bytes"_a,
        "page_bytes"_a, "rows_per_page"_a, "lines"_a, "ahead"_a, "group_bytes"_a, "chunk_bytes"_a,
        "capacity_rows for plan_annex(), so that so many lines are enough; by planning a sample of the rows.");

  nb::class_<RunningAnnexSweep>(m, "AnnexSweep", "Makes the copies of a plan, in a thread.")
      .def("__init__", &new_sweep, "engine"_a, "writer"_a, "workers"_a, "plan"_a, nb::kw_only(), "chunks"_a,
           "gap_bytes"_a, "first_page"_a, nb::arg("checksums").noconvert() = nb::none())
      .def("cancel", [](RunningAnnexSweep& sweep) { sweep->cancel(); })
      .def_prop_ro("ended", [](RunningAnnexSweep& sweep) { return sweep->wait_for(0); })
      .def("wait", [](RunningAnnexSweep& sweep) { wait(*sweep); return result_of(sweep); },
           "Blocks. Returns error (an errno or 0), in_table or in_annex, file, offset, bytes_read, bytes_written and "
           "busy_s.");
}

}  // namespace gids
