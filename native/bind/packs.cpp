// gids._core: what gids.packs is made of. Checks types and shapes by signature, releases the GIL around work and
// lets Ctrl-C through.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <vector>

#include "bind/bind.h"
#include "bind/fork.h"
#include "bind/running.h"
#include "cache/planner.h"
#include "packs/annex_plan.h"
#include "packs/sweep.h"
#include "packs/run_reader.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gids {
namespace {

using packs::AnnexPlan;
using packs::AnnexSweep;
using packs::Cancel;
using packs::RunMemory;
using packs::RunReader;
using packs::Uses;
using packs::Writer;

using RowIds = nb::ndarray<const u32, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Checksums = nb::ndarray<const u32, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Scales = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<u32, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<u8, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using RunningAnnexSweep = Running<AnnexSweep>;

// Calls heed_signals ten times a second at most.
class Signals {
 public:
  explicit Signals(const Cancel* cancel) : cancel_(cancel) {}
  void operator()() {
    if (cancel_ && cancel_->wanted) throw std::system_error(ECANCELED, std::generic_category(), "the plan of an annex");
    const auto now = std::chrono::steady_clock::now();
    if (now < next_) return;
    next_ = now + std::chrono::milliseconds(100);
    heed_signals();
  }

 private:
  const Cancel* cancel_;
  std::chrono::steady_clock::time_point next_{};
};

u32 step_of(u64 step, u64 steps) {
  if (step >= steps)
    throw std::out_of_range("step " + std::to_string(step) + " of a superbatch of " + std::to_string(steps));
  return static_cast<u32>(step);
}

std::shared_ptr<AnnexPlan> plan_annex(Uses& uses, cache::Workers& workers, const Cancel* cancel, u64 row_count,
                                      u32 row_bytes, u32 page_bytes, u32 rows_per_page, u32 shard_count,
                                      u32 first_file, u64 lines, u32 group_bytes, u32 chunk_bytes) {
  const cache::Geometry geometry{row_count, row_bytes, page_bytes, rows_per_page, shard_count, first_file};
  nb::gil_scoped_release release;
  return packs::plan_annex(uses, geometry, {lines, group_bytes, chunk_bytes}, workers, Signals(cancel));
}

void new_sweep(RunningAnnexSweep* self, std::shared_ptr<io::Engine> engine, std::shared_ptr<Writer> writer,
               std::shared_ptr<cache::Workers> workers, std::shared_ptr<Uses> uses, std::shared_ptr<AnnexPlan> plan,
               std::shared_ptr<Cancel> cancel, u32 chunks, u32 gap_bytes, std::optional<Checksums> checksums) {
  packs::AnnexSweepOptions options{chunks, gap_bytes, {}, std::move(cancel)};
  if (checksums) options.checksums = {checksums->data(), checksums->size()};
  std::vector<nb::object> kept;
  if (checksums) kept.push_back(nb::cast(*checksums));
  new (self) RunningAnnexSweep(std::move(kept), std::move(engine), std::move(writer), std::move(workers),
                               std::move(uses), std::move(plan), options);
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

using RunningReader = Running<RunReader>;

void new_reader(RunningReader* self, std::shared_ptr<io::Engine> engine, std::shared_ptr<cache::Workers> workers,
                std::shared_ptr<RunMemory> memory, std::shared_ptr<Uses> uses, std::shared_ptr<AnnexPlan> plan,
                u64 stored_as, u64 wanted_as, u32 row_values, std::optional<Scales> scales) {
  cache::RowForm form{static_cast<ValueType>(stored_as), static_cast<ValueType>(wanted_as), plan->geometry.row_bytes,
                      row_values};
  std::vector<nb::object> kept;
  if (scales) {
    form.scales = {scales->data(), scales->size()};
    kept.push_back(nb::cast(*scales));
  }
  new (self) RunningReader(std::move(kept), std::move(engine), std::move(workers), std::move(memory), std::move(uses),
                           std::move(plan), form);
}

nb::tuple read_step(RunningReader& reader, Rows out) {
  if (out.shape(0) != reader->next_uses() || out.shape(1) != reader->out_row_bytes())
    throw std::invalid_argument("out: expected uint8[" + std::to_string(reader->next_uses()) + ", " +
                                std::to_string(reader->out_row_bytes()) + "]");
  RunReader::Result r;
  {
    nb::gil_scoped_release release;
    r = reader->read(reinterpret_cast<std::byte*>(out.data()), Signals(nullptr));
  }
  return nb::make_tuple(r.error, r.file, r.offset, r.overflowed);
}

void numbers(RunningReader& reader, Numbers sources, Numbers keeps) {
  if (sources.size() != reader->next_uses() || keeps.size() != reader->next_copies())
    throw std::invalid_argument("expected uint32[" + std::to_string(reader->next_uses()) + "] and uint32[" +
                                std::to_string(reader->next_copies()) + "]");
  nb::gil_scoped_release release;
  reader->numbers({sources.data(), sources.size()}, {keeps.data(), keeps.size()});
}

nb::tuple next_piece(RunningReader& reader) {
  RunReader::View v;
  {
    nb::gil_scoped_release release;
    v = reader->next_piece(Signals(nullptr));
  }
  const RunReader::Result& r = v.result;
  return nb::make_tuple(r.error, r.file, r.offset, reinterpret_cast<u64>(v.memory), v.first, v.rows);
}

nb::dict stats_of(const RunningReader& reader) {
  const RunReader::Stats& s = reader->stats();
  nb::dict d;
  d["steps"] = s.steps;
  d["rows"] = s.rows;
  d["bytes_read"] = s.bytes_read;
  d["wait_s"] = static_cast<double>(s.wait_ns) * 1e-9;
  d["gather_s"] = static_cast<double>(s.gather_ns) * 1e-9;
  return d;
}

}  // namespace

void bind_packs(nb::module_& m) {
  m.attr("SCRATCH_STRIPE_BYTES") = packs::stripe_bytes;
  m.def("check_rows",
        [](const nb::ndarray<const i64, nb::ndim<1>, nb::c_contig, nb::device::cpu>& ids, u64 row_count) {
          nb::gil_scoped_release release;
          cache::Planner::check({ids.data(), ids.size()}, row_count);
        },
        "ids"_a.noconvert(), "row_count"_a, "Raises IndexError for an id out of range.");

  m.attr("ANNEX_MOST_STEPS") = packs::note::most_steps;
  m.attr("ANNEX_RANGES") = packs::ranges_max;
  m.attr("ANNEX_USE_BYTES") = Uses::use_bytes;
  m.attr("ANNEX_RUNS_AT_ONCE") = packs::runs_at_once;
  m.def("annex_group_bytes", [](u64 row_bytes) {
    const u64 stride = packs::stride_of(row_bytes);
    return packs::block_rows(stride) * stride;
  }, "row_bytes"_a, "The least bytes of a write buffer of the sweep.");
  m.def("annex_row_bytes", &packs::stride_of, "row_bytes"_a, "Bytes of a row in an annex, and in a line.");

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
      .def("__len__", &Uses::steps)
      .def_prop_ro("uses", [](const Uses& uses) { return uses.size(); })
      .def_prop_ro("longest", &Uses::longest, "Uses of the step that has most.");

  nb::class_<Cancel>(m, "Cancel", "Ends plan_annex() and an AnnexSweep from another thread.")
      .def("__init__", [](Cancel*) { throw nb::type_error("use Cancel.create"); })
      .def_static("create", [] { return std::make_shared<Cancel>(); })
      .def("cancel", [](Cancel& cancel) { cancel.wanted = true; });

  nb::class_<AnnexPlan>(m, "AnnexPlan", "Which copies of rows an annex has, and how long lines keep them.")
      .def("__init__", [](AnnexPlan*) { throw nb::type_error("use plan_annex"); })
      .def_prop_ro("copies", [](const AnnexPlan& plan) { return plan.copies; })
      .def_prop_ro("kept", [](const AnnexPlan& plan) { return plan.kept; }, "Copies that lines keep.")
      .def_prop_ro("runs", &AnnexPlan::runs, "Steps with copies.")
      .def_prop_ro("group_bytes", &AnnexPlan::group_bytes,
                   "Of a buffer that the sweep needs for each run, and for one more.")
      .def_prop_ro("chunk_bytes", [](const AnnexPlan& p) { return p.chunk_pages * p.geometry.page_bytes; },
                   "Of the table, that the sweep reads at a time.")
      .def_prop_ro("nbytes", &AnnexPlan::bytes, "Of the annex.");

  m.def("plan_annex", &plan_annex, "uses"_a, "workers"_a, nb::kw_only(), "cancel"_a.none() = nb::none(), "row_count"_a,
        "row_bytes"_a, "page_bytes"_a, "rows_per_page"_a, "shard_count"_a, "first_file"_a, "lines"_a, "group_bytes"_a,
        "chunk_bytes"_a, "Plans the copies for a cache of so many lines. The uses become what a RunReader does.");

  nb::class_<Writer>(m, "PackWriter", "Writes the copies to a scratch file.")
      .def("__init__", [](Writer*) { throw nb::type_error("use PackWriter.create"); })
      .def_static("create",
                  [](const std::vector<int>& fds, u32 threads, u32 buffers, u64 buffer_bytes) {
                    if (fds.empty()) throw std::invalid_argument("fds is empty");
                    return share_here<Writer>(fds, threads, buffers, buffer_bytes);
                  },
                  "fds"_a, nb::kw_only(), "threads"_a, "buffers"_a, "buffer_bytes"_a,
                  "fds: of the files that the scratch file is striped over.");

  nb::class_<RunningAnnexSweep>(m, "AnnexSweep", "Makes the copies of a plan, in a thread.")
      .def("__init__", &new_sweep, "engine"_a, "writer"_a, "workers"_a, "uses"_a, "plan"_a, nb::kw_only(),
           "cancel"_a.none() = nb::none(), "chunks"_a,
           "gap_bytes"_a, nb::arg("checksums").noconvert() = nb::none())
      .def("wait", [](RunningAnnexSweep& sweep) { wait(*sweep); return result_of(sweep); },
           "Blocks. Returns error (an errno or 0), in_table or in_annex, file, offset, bytes_read, bytes_written and "
           "busy_s.");

  nb::class_<RunMemory>(m, "RunMemory", "Memory for the rows that a RunReader keeps, and for pieces of its runs.")
      .def("__init__", [](RunMemory*, u64, u32, u32, u64) { throw nb::type_error("use RunMemory.create"); })
      .def_static("create",
                  [](u64 lines, u32 row_bytes, u32 pieces, u64 piece_bytes, bool lines_here) {
                    return std::make_shared<RunMemory>(lines, row_bytes, pieces, piece_bytes, lines_here);
                  },
                  nb::kw_only(), "lines"_a, "row_bytes"_a, "pieces"_a, "piece_bytes"_a, "lines_here"_a = true)
      .def_prop_ro("lines", &RunMemory::lines)
      .def_prop_ro("pieces", &RunMemory::pieces)
      .def_prop_ro("pieces_address", [](RunMemory& m) { return reinterpret_cast<u64>(m.piece(0)); })
      .def_prop_ro("pieces_bytes", &RunMemory::pieces_bytes)
      .def_prop_ro("nbytes", &RunMemory::bytes);

  nb::class_<RunningReader>(m, "RunReader", "Reads the steps of a superbatch from its annex, in their order.")
      .def("__init__", &new_reader, "engine"_a, "workers"_a, "memory"_a, "uses"_a, "plan"_a, nb::kw_only(),
           "stored_as"_a, "wanted_as"_a, "row_values"_a, nb::arg("scales").noconvert() = nb::none())
      .def("read", &read_step, nb::arg("out").noconvert(),
           "The rows of the next step, to uint8[uses, bytes of a row], in the order of its uses. Returns (an errno or "
           "0, file, offset, whether a finite value became infinite).")
      .def_prop_ro("next_step", [](RunningReader& reader) { return reader->next_step(); })
      .def_prop_ro("next_uses", [](RunningReader& reader) { return reader->next_uses(); })
      .def_prop_ro("next_copies", [](RunningReader& reader) { return reader->next_copies(); })
      .def("numbers", &numbers, "sources"_a.noconvert(), "keeps"_a.noconvert(),
           "Where lines are elsewhere: of the next step, for each use its line, or 2^31 + the row of the run; for each "
           "row of the run the line that keeps it, or 2^32 - 1.")
      .def("next_piece", &next_piece,
           "Then rows of its run: (an errno or 0, file, offset, address, first row, rows). Blocks.")
      .def("free_piece", [](RunningReader& reader) { reader->free_piece(); },
           "The memory of the oldest piece that came is read into again.")
      .def("end_step", [](RunningReader& reader) { reader->end_step(); })
      .def("stats", &stats_of);
}

}  // namespace gids
