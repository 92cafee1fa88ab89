// gids._core: what gids.packs is made of. Checks types and shapes by signature, keeps the memory that native threads
// read and write, releases the GIL around work.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <sys/mman.h>
#include <unistd.h>

#include <optional>
#include <tuple>
#include <vector>

#include "bind/bind.h"
#include "bind/fork.h"
#include "bind/running.h"
#include "cache/planner.h"
#include "packs/counts.h"
#include "packs/cutter.h"
#include "packs/gather.h"
#include "packs/sweep.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gids {
namespace {

using packs::Counts;
using packs::Cutter;
using packs::PackRead;
using packs::Priority;
using packs::RowList;
using packs::RowSet;
using packs::Sweep;
using packs::Writer;

using RowIds = nb::ndarray<const u32, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Checksums = nb::ndarray<const u32, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Scales = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<u8, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::span<const u32> span_of(const RowIds& a) { return {a.data(), a.size()}; }

// Memory for packs. Python and native threads share it; a forked child does not get it.
struct PackMemory {
  explicit PackMemory(u64 bytes) : memory(bytes) {}
  std::byte* at(u64 offset, u64 bytes) {
    if (offset > memory.bytes() || bytes > memory.bytes() - offset)
      throw std::invalid_argument("the memory for packs has " + std::to_string(memory.bytes()) + " bytes, and " +
                                  std::to_string(bytes) + " do not fit at " + std::to_string(offset));
    return memory.data() + offset;
  }
  void discard(u64 offset, u64 bytes) {
    std::byte* const begin = at(offset, bytes);
    const u64 page = static_cast<u64>(sysconf(_SC_PAGESIZE)), skipped = align_up(offset, page) - offset;
    if (bytes > skipped) madvise(begin + skipped, (bytes - skipped) / page * page, MADV_DONTNEED);
  }
  HugeArray<std::byte> memory;
};

// A target and the memory that it keeps. memory: None for the scratch file.
struct BoundTarget {
  std::shared_ptr<RowList> rows;
  std::shared_ptr<PackMemory> memory;
  u64 offset;
};

struct BoundTable {
  cache::Geometry geometry;
  std::optional<Checksums> checksums;
  std::vector<BoundTarget> targets;
};

using RunningSweep = Running<Sweep>;
using RunningRead = Running<PackRead>;

void new_sweep(RunningSweep* self, std::shared_ptr<io::Engine> engine, std::shared_ptr<Writer> writer,
               std::shared_ptr<Priority> priority, const std::vector<nb::object>& tables, u32 piece_bytes, u32 pieces,
               u32 gap_bytes, u32 threads) {
  std::vector<packs::TableSweep> sweeps;
  for (const nb::object& object : tables) {
    const auto& table = nb::cast<const BoundTable&>(object);
    packs::TableSweep& sweep = sweeps.emplace_back();
    sweep.geometry = table.geometry;
    if (table.checksums) {
      if (table.checksums->size() != table.geometry.page_count())
        throw std::invalid_argument("checksums: expected one for each page");
      sweep.checksums = {table.checksums->data(), table.checksums->size()};
    }
    for (const BoundTarget& t : table.targets) {
      const u64 bytes = t.rows->size() * table.geometry.row_bytes;
      sweep.targets.push_back({t.rows, t.memory ? t.memory->at(t.offset, bytes) : nullptr, t.offset});
    }
  }
  new (self) RunningSweep(tables, std::move(engine), std::move(writer), std::move(priority), std::move(sweeps),
                          packs::SweepOptions{piece_bytes, pieces, gap_bytes, threads});
}

nb::dict sweep_result(const RunningSweep& sweep) {
  nb::list bad;
  for (const packs::BadPage& page : sweep->bad_pages()) bad.append(nb::make_tuple(page.file, page.offset, page.error));
  nb::dict d;
  d["error"] = sweep->error();
  d["bad_pages"] = bad;
  d["bytes_read"] = sweep->bytes_read();
  d["busy_s"] = static_cast<double>(sweep->busy_ns()) * 1e-9;
  return d;
}

using Holders = std::vector<std::tuple<std::shared_ptr<RowSet>, std::shared_ptr<PackMemory>, u64>>;

std::tuple<u64, bool> gather(cache::Workers& workers, RowIds ids, const Holders& holders, u32 row_bytes, u64 stored_as,
                             u64 wanted_as, u32 row_values, std::optional<Scales> scales, Rows out) {
  cache::RowForm form;
  form.from = static_cast<ValueType>(stored_as);
  form.to = static_cast<ValueType>(wanted_as);
  form.row_bytes = row_bytes;
  form.values = row_values;
  if (scales) form.scales = {scales->data(), scales->size()};
  form.validate();
  if (out.shape(0) != ids.size() || out.shape(1) != form.out_row_bytes())
    throw std::invalid_argument("out: expected " + std::to_string(ids.size()) + " rows of " +
                                std::to_string(form.out_row_bytes()) + " bytes");
  std::vector<packs::Holder> found;
  for (const auto& [rows, memory, offset] : holders)
    found.push_back({rows.get(), memory->at(offset, rows->size() * row_bytes)});
  nb::gil_scoped_release release;
  for (const u32 id : span_of(ids))
    for (const packs::Holder& holder : found)
      if (id >= holder.rows->row_count()) throw std::out_of_range("a row is outside its table");
  return packs::gather(workers, span_of(ids), found, form, reinterpret_cast<std::byte*>(out.data()));
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
  m.def("row_set_bytes", &RowSet::bytes_of, "row_count"_a, "Bytes of a RowSet over a table of this many rows.");

  nb::class_<RowSet>(m, "RowSet", "Rows of a table that a pack holds.")
      .def("__init__", [](RowSet*, u64) { throw nb::type_error("use RowSet.create"); })
      .def_static("create", [](u64 rows) { return std::make_shared<RowSet>(rows); }, "row_count"_a)
      .def("insert",
           [](RowSet& set, const RowIds& rows, const RowSet* without) {
             nb::gil_scoped_release release;
             for (const u32 row : span_of(rows)) {
               if (row >= set.row_count()) throw std::out_of_range("a row is outside its table");
               if (!without || !without->contains(row)) set.insert(row);
             }
           },
           "rows"_a.noconvert(), "without"_a.none() = nb::none(), "Inserts rows that the other set does not contain.")
      .def("clear", &RowSet::clear, nb::call_guard<nb::gil_scoped_release>())
      .def("seal", &RowSet::seal, nb::call_guard<nb::gil_scoped_release>())
      .def("rows",
           [](const RowSet& set) {
             std::vector<u32> found;
             set.each(0, set.row_count(), [&](u64 row) { found.push_back(static_cast<u32>(row)); });
             return found;
           },
           "Ascending.")
      .def("words",
           [](const RowSet& set) {
             return nb::ndarray<nb::numpy, const u64, nb::ndim<1>>(set.ranked().words, {set.word_count()},
                                                                   nb::find(&set));
           },
           "uint64[ceil(row_count / 64)]: a bit for each row. A view.")
      .def("ranks",
           [](const RowSet& set) {
             if (!set.sealed()) throw std::invalid_argument("a set has ranks once it is sealed");
             return nb::ndarray<nb::numpy, const u32, nb::ndim<1>>(set.ranked().ranks, {set.word_count()},
                                                                   nb::find(&set));
           },
           "uint32 for each word: rows of the set in the words before it. A view of a sealed set.")
      .def("__len__", &RowSet::size)
      .def_prop_ro("nbytes", &RowSet::bytes);

  nb::class_<RowList>(m, "RowList", "The rows of a pack that waits.")
      .def("__init__", [](RowList*, const RowSet&) { throw nb::type_error("use RowList.create"); })
      .def_static("create",
                  [](const RowSet& rows, u64 skipped, std::optional<u64> count) {
                    nb::gil_scoped_release release;
                    if (skipped > rows.size() || count.value_or(0) > rows.size() - skipped)
                      throw std::invalid_argument("the set has fewer rows");
                    return std::make_shared<RowList>(rows, skipped, count.value_or(rows.size() - skipped));
                  },
                  "rows"_a, "skipped"_a = 0, "count"_a = nb::none(),
                  "count of the rows, without the first skipped ones.")
      .def("to_set",
           [](const RowList& list) {
             nb::gil_scoped_release release;
             auto set = std::make_shared<RowSet>(list.row_count());
             list.insert_into(*set);
             set->seal();
             return set;
           },
           "Sealed.")
      .def("__len__", &RowList::size)
      .def_prop_ro("nbytes", &RowList::bytes);

  nb::class_<Counts>(m, "Counts", "How many minibatches want each row of a table.")
      .def("__init__", [](Counts*, u64) { throw nb::type_error("use Counts.create"); })
      .def_static("create", [](u64 rows) { return std::make_shared<Counts>(rows); }, "row_count"_a)
      .def("add",
           [](Counts& counts, const RowIds& rows) {
             nb::gil_scoped_release release;
             return counts.add(span_of(rows));
           },
           "rows"_a.noconvert(), "Counts a minibatch's rows, each once; returns how many distinct ones it has.")
      .def("histogram", &Counts::histogram, nb::call_guard<nb::gil_scoped_release>())
      .def("hottest",
           [](const Counts& counts, u64 rows) {
             nb::gil_scoped_release release;
             return std::make_shared<RowSet>(counts.set_of(counts.hottest(rows)));
           },
           "rows"_a, "The most wanted rows, sealed; of equally wanted ones the first.")
      .def_prop_ro("nbytes", &Counts::bytes);

  nb::class_<Cutter>(m, "Cutter", "Cuts minibatches into packs.")
      .def("__init__",
           [](Cutter* self, const std::vector<std::tuple<std::shared_ptr<RowSet>, u64>>& spaces, u64 pack_bytes,
              u64 lists_bytes, bool parts) {
             std::vector<packs::Space> of;
             for (const auto& [resident, row_bytes] : spaces) of.push_back({resident, row_bytes});
             new (self) Cutter(std::move(of), pack_bytes, lists_bytes, parts);
           },
           "spaces"_a, "pack_bytes"_a, nb::kw_only(), "lists_bytes"_a = 0, "parts"_a = false,
           "spaces: (resident rows, row_bytes) of each. lists_bytes: the first packs get row lists, which take at "
           "most so many. parts: a minibatch that does not fit in a pack is cut into several.")
      .def("add",
           [](Cutter& cutter, const std::vector<RowIds>& rows) {
             std::vector<std::span<const u32>> of;
             for (const RowIds& a : rows) of.push_back(span_of(a));
             if (of.size() != cutter.space_count()) throw std::invalid_argument("rows: expected those of each space");
             nb::gil_scoped_release release;
             cutter.add(of);
           },
           "rows"_a)
      .def("packs",
           [](const Cutter& cutter) {
             std::vector<std::tuple<u64, std::vector<u64>>> found;
             for (auto& pack : cutter.packs()) found.emplace_back(pack.end, std::move(pack.rows));
             return found;
           },
           "(the minibatch after its last one, rows of each space) of each pack.")
      .def("take_lists", &Cutter::take_lists, nb::call_guard<nb::gil_scoped_release>(),
           "After the last minibatch: RowLists of each space of the first packs.")
      .def_prop_ro("largest_bytes", &Cutter::largest_bytes);

  nb::class_<PackMemory>(m, "PackMemory", "Memory for packs.")
      .def("__init__", [](PackMemory*, u64) { throw nb::type_error("use PackMemory.create"); })
      .def_static("create", [](u64 bytes) { return share_here<PackMemory>(bytes); }, "nbytes"_a)
      .def("bytes",
           [](PackMemory& memory) {
             return nb::ndarray<nb::numpy, u8, nb::ndim<1>>(reinterpret_cast<u8*>(memory.memory.data()),
                                                            {memory.memory.bytes()}, nb::find(&memory));
           },
           "uint8[nbytes]: a view.")
      .def("discard", [](PackMemory& memory, u64 at, u64 bytes) { memory.discard(at, bytes); }, "at"_a, "nbytes"_a,
           "Gives whole pages of memory back until they are written again. Their contents are lost.")
      .def_prop_ro("nbytes", [](const PackMemory& memory) { return memory.memory.bytes(); });

  nb::class_<Priority>(m, "Priority", "Lets reads of packs go before a sweep.")
      .def("__init__", [](Priority*) { throw nb::type_error("use Priority.create"); })
      .def_static("create", [] { return std::make_shared<Priority>(); });

  nb::class_<Writer>(m, "PackWriter", "Writes packs to a scratch file.")
      .def("__init__", [](Writer*) { throw nb::type_error("use PackWriter.create"); })
      .def_static("create",
                  [](const std::vector<int>& fds, u32 threads, u32 buffers, u64 buffer_bytes) {
                    if (fds.empty()) throw std::invalid_argument("fds is empty");
                    return share_here<Writer>(fds, threads, buffers, buffer_bytes);
                  },
                  "fds"_a, nb::kw_only(), "threads"_a, "buffers"_a, "buffer_bytes"_a,
                  "fds: of the files that the scratch file is striped over.")
      .def_prop_ro("failed_file", &Writer::failed_file, "The file that the first error is of; 0 without one.")
      .def_prop_ro("bytes_written", &Writer::bytes_written);

  nb::class_<BoundTable>(m, "SweepTable", "A table of a sweep, and where its rows go.")
      .def("__init__",
           [](BoundTable* self, u64 row_count, u32 row_bytes, u32 page_bytes, u32 rows_per_page, u32 shard_count,
              u32 first_file, std::optional<Checksums> checksums,
              const std::vector<std::tuple<std::shared_ptr<RowList>, std::shared_ptr<PackMemory>, u64>>& targets) {
             new (self) BoundTable{{row_count, row_bytes, page_bytes, rows_per_page, shard_count, first_file},
                                    std::move(checksums),
                                    {}};
             for (const auto& [rows, memory, offset] : targets) self->targets.push_back({rows, memory, offset});
           },
           nb::kw_only(), "row_count"_a, "row_bytes"_a, "page_bytes"_a, "rows_per_page"_a, "shard_count"_a,
           "first_file"_a, nb::arg("checksums").noconvert() = nb::none(), "targets"_a,
           "targets: (RowList, PackMemory, or None for the scratch file, offset) of each.");

  nb::class_<RunningSweep>(m, "Sweep", "Copies wanted rows of tables to packs, in a thread.")
      .def("__init__", &new_sweep, "engine"_a, "writer"_a.none(), "priority"_a, "tables"_a, nb::kw_only(),
           "piece_bytes"_a, "pieces"_a, "gap_bytes"_a, "threads"_a)
      .def("cancel", [](RunningSweep& sweep) { sweep->cancel(); })
      .def_prop_ro("ended", [](RunningSweep& sweep) { return sweep->wait_for(0); })
      .def("wait", [](RunningSweep& sweep) { wait(*sweep); return sweep_result(sweep); },
           "Blocks. Returns error (an errno or 0), bad_pages [(file, offset, errno)], bytes_read, busy_s.");

  nb::class_<RunningRead>(m, "PackRead", "Reads a part of a file into PackMemory, in the background.")
      .def("__init__",
           [](RunningRead* self, std::shared_ptr<io::Engine> engine, std::shared_ptr<Priority> priority, u32 file,
              u64 offset, nb::object memory, u64 at, u64 bytes, u32 files) {
             if (!files) throw std::invalid_argument("files must be 1 or more");
             std::byte* const to = nb::cast<PackMemory&>(memory).at(at, bytes);
             new (self) RunningRead({memory}, std::move(engine), std::move(priority), file, offset, to, bytes,
                                    packs::Stripes{files});
           },
           "engine"_a, "priority"_a, "file"_a, "offset"_a, "memory"_a, "at"_a, "nbytes"_a, nb::kw_only(),
           "files"_a = 1, "files: that it is striped over, from `file` on.")
      .def_prop_ro("ended", [](RunningRead& read) { return read->wait_for(0); })
      .def_prop_ro("busy_s", [](RunningRead& read) { return static_cast<double>(read->busy_ns()) * 1e-9; })
      .def("wait",
           [](RunningRead& read) {
             wait(*read);
             std::vector<std::tuple<u64, u64, int>> bad;
             for (const auto& b : read->bad()) bad.emplace_back(b.begin, b.end, b.error);
             return bad;
           },
           "Blocks. Returns the bytes that could not be read: [(begin, end, errno)].");

  m.def("gather_packed", &gather, "workers"_a, "ids"_a.noconvert(), "holders"_a, nb::kw_only(), "row_bytes"_a,
        "stored_as"_a, "wanted_as"_a, "row_values"_a, nb::arg("scales").noconvert() = nb::none(), "out"_a.noconvert(),
        "Copies rows from the first (RowSet, PackMemory, offset) that has them. Returns how many none has, and whether "
        "a finite value became infinite.");
}

}  // namespace gids
