// Python's view of the request queue's host side: its memory, and the service thread. Called by module.cpp; the
// user is gids.io.device.device_queue.
#include <unistd.h>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bind/bind.h"
#include "io/queue_memory.h"
#include "io/queue_service.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gids {
namespace {

using Checksums = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = std::tuple<u64, u32, u32, u32, std::optional<Checksums>>;

// A QueueService over one QueueMemory that owns a reference to all that it reads: arrays, memory, engine.
class OwningService {
 public:
  OwningService(std::shared_ptr<io::Engine> engine, const std::vector<Table>& tables, const io::QueueMemory& memory,
                u32 timeout_ms)
      : engine_(engine), memory_(memory.shared()), memory_bytes_(memory.shared_bytes()) {
    std::vector<io::QueueTable> list;
    for (const auto& [page_count, first_file, file_count, page_bytes, checksums] : tables) {
      if (checksums && checksums->size() != page_count)
        throw std::invalid_argument("queue service: table " + std::to_string(list.size()) + " has " +
                                    std::to_string(page_count) + " pages and " + std::to_string(checksums->size()) +
                                    " checksums");
      list.push_back({page_count, first_file, file_count, page_bytes, checksums ? checksums->data() : nullptr});
      if (checksums) checksums_.push_back(*checksums);
    }
    std::vector<queue::Pair> pairs;
    for (u32 p = 0; p < memory.pairs(); ++p) pairs.push_back(memory.pair(p, nullptr));
    service_ = std::make_unique<io::QueueService>(engine, std::move(list), std::move(pairs), memory.shared(),
                                                  timeout_ms);
    engine->register_memory(memory_.get(), memory_bytes_, memory_);
  }
  ~OwningService() {
    if (getpid() != pid_) {  // a forked child has neither its thread nor its memory
      (void)service_.release();
      return;
    }
    nb::gil_scoped_release release;
    service_.reset();  // closes: only then may the arrays go
    engine_->forget_memory(memory_.get(), memory_bytes_);
  }

  io::QueueService& get() const { return *service_; }

 private:
  const pid_t pid_ = getpid();
  const std::shared_ptr<io::Engine> engine_;
  const std::shared_ptr<std::byte> memory_;
  const size_t memory_bytes_;
  std::vector<Checksums> checksums_;
  std::unique_ptr<io::QueueService> service_;
};

io::QueueMemory* make_memory(u64 staging_bytes, u32 slot_bytes, u32 pairs, u32 rounds_max, u64 spin_ns) {
  return new io::QueueMemory({staging_bytes, slot_bytes, pairs, rounds_max, spin_ns});
}

nb::bytes pair_bytes(const io::QueueMemory& memory, u32 pair, u64 shared, u64 local) {
  const queue::Pair q = memory.pair(pair, shared, local);
  return nb::bytes(&q, sizeof q);
}

// Where a pair's words and pages are, from the beginning of the shared memory: completed, statuses, staging.
std::tuple<u64, u64, u64> offsets(const io::QueueMemory& memory, u32 pair) {
  const queue::Pair q = memory.pair(pair, u64{0}, u64{0});
  const auto at = [](const void* p) -> u64 { return reinterpret_cast<uintptr_t>(p); };
  return {at(q.completed), at(q.statuses), at(q.staging)};
}

nb::dict stats(const OwningService& service) {
  const io::QueueStats s = service.get().stats();
  nb::dict d;
  d["taken"] = s.taken;
  d["failed"] = s.failed;
  d["timed_out"] = s.timed_out;
  d["corrupt"] = s.corrupt;
  d["late"] = s.late;
  d["rounds"] = s.rounds;
  d["sleeps"] = s.sleeps;
  return d;
}

}  // namespace

void bind_queue(nb::module_& m) {
  m.attr("QUEUE_TABLE_SHIFT") = queue::page_bits;
  m.attr("QUEUE_TABLES_MAX") = queue::tables_max;
  m.attr("QUEUE_SLOT_UNIT") = queue::slot_unit;
  m.attr("QUEUE_DOORBELLS") = queue::doorbells;
  m.attr("QUEUE_PAIRS_MAX") = u32{io::QueueOptions::pairs_max};

  nb::class_<io::QueueMemory>(m, "QueueMemory")
      .def(nb::new_(&make_memory), nb::kw_only(), "staging_bytes"_a, "slot_bytes"_a, "pairs"_a, "rounds_max"_a,
           "spin_ns"_a)
      .def_prop_ro("address", [](const io::QueueMemory& q) { return reinterpret_cast<uintptr_t>(q.shared().get()); })
      .def_prop_ro("shared_bytes", &io::QueueMemory::shared_bytes)
      .def_prop_ro("local_bytes", &io::QueueMemory::local_bytes)
      .def_prop_ro("depth", &io::QueueMemory::depth)
      .def_prop_ro("slot_bytes", &io::QueueMemory::slot_bytes)
      .def("pair", &pair_bytes, "pair"_a, "shared"_a, "local"_a)
      .def("offsets", &offsets, "pair"_a);

  nb::class_<OwningService>(m, "QueueService")
      .def(nb::init<std::shared_ptr<io::Engine>, const std::vector<Table>&, const io::QueueMemory&, u32>(), "engine"_a,
           "tables"_a.noconvert(), "memory"_a, nb::kw_only(), "timeout_ms"_a)
      .def("arm", [](const OwningService& s, u32 pair) { return s.get().arm(pair); }, "pair"_a)
      .def("stats", &stats)
      .def("close", [](const OwningService& s) { s.get().close(); }, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace gids
