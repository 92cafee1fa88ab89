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
    service_ = std::make_unique<io::QueueService>(engine, std::move(list), memory.pair(nullptr), memory.shared(),
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

io::QueueMemory* make_memory(u64 staging_bytes, u32 slot_bytes, u32 rounds_max, u64 spin_ns) {
  return new io::QueueMemory({staging_bytes, slot_bytes, rounds_max, spin_ns});
}

nb::bytes pair_bytes(const io::QueueMemory& memory, u64 shared, u64 local) {
  const queue::Pair q = memory.pair(shared, local);
  return nb::bytes(&q, sizeof q);
}

// Where a round's answer and pages are, from the beginning of the shared memory.
std::tuple<u64, u64> offsets(const io::QueueMemory& memory, u64 round) {
  const queue::Pair q = memory.pair(u64{0}, u64{0});
  return {reinterpret_cast<uintptr_t>(q.answer(round)), reinterpret_cast<uintptr_t>(q.pages(round))};
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
  m.attr("QUEUE_SLOT_UNIT") = queue::slot_unit;
  m.attr("QUEUE_ROUNDS_MAX") = queue::rounds_limit;
  m.attr("QUEUE_COUNT_BITS") = queue::count_bits;

  nb::class_<io::QueueMemory>(m, "QueueMemory")
      .def(nb::new_(&make_memory), nb::kw_only(), "staging_bytes"_a, "slot_bytes"_a, "rounds_max"_a, "spin_ns"_a)
      .def_prop_ro("address", [](const io::QueueMemory& q) { return reinterpret_cast<uintptr_t>(q.shared().get()); })
      .def_prop_ro("shared_bytes", &io::QueueMemory::shared_bytes)
      .def_prop_ro("local_bytes", &io::QueueMemory::local_bytes)
      .def_prop_ro("round_max", &io::QueueMemory::round_max)
      .def_prop_ro("slot_bytes", &io::QueueMemory::slot_bytes)
      .def("pair", &pair_bytes, "shared"_a, "local"_a)
      .def("offsets", &offsets, "round"_a);

  nb::class_<OwningService>(m, "QueueService")
      .def(nb::init<std::shared_ptr<io::Engine>, const std::vector<Table>&, const io::QueueMemory&, u32>(), "engine"_a,
           "tables"_a.noconvert(), "memory"_a, nb::kw_only(), "timeout_ms"_a)
      .def("arm", [](const OwningService& s) { return s.get().arm(); })
      .def("stats", &stats)
      .def("close", [](const OwningService& s) { s.get().close(); }, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace gids
