// gids._core: Planner, PageCache, Workers, BufferPool. Checks types and shapes by signature, holds the
// arrays that native code reads and writes, releases the GIL around work and lets Ctrl-C through waits.
#include <unistd.h>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "bind/bind.h"
#include "bind/fork.h"
#include "bind/signals.h"
#include "cache/buffers.h"
#include "cache/page_cache.h"
#include "gids/device_cache.h"
#include "gids/row_copy.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gids {
namespace {

using cache::BufferPool;
using cache::CacheOptions;
using cache::Failure;
using cache::Geometry;
using cache::PageCache;
using cache::Planner;
using cache::Policy;
using cache::Workers;

using Ids = nb::ndarray<const i64, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const u8, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Scales = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Checksums = nb::ndarray<const u32, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<u8, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::span<const i64> span_of(const Ids& a) { return {a.data(), a.size()}; }

Policy policy_of(const std::string& name) {
  if (name == "lookahead") return Policy::lookahead;
  if (name == "window-pin") return Policy::window_pin;
  if (name == "random") return Policy::random;
  if (name == "lru") return Policy::lru;
  if (name == "static") return Policy::fixed;
  if (name == "pinned") return Policy::pinned;
  throw std::invalid_argument("policy must be one of lookahead, window-pin, random, lru, static, pinned (got '" + name +
                              "')");
}

// Policies of the cache in device memory, in their order there.
nb::dict device_policies() {
  nb::dict d;
  d["lookahead"] = static_cast<u32>(score::Policy::lookahead);
  d["window-pin"] = static_cast<u32>(score::Policy::window_pin);
  d["random"] = static_cast<u32>(score::Policy::random);
  d["static"] = static_cast<u32>(score::Policy::fixed);
  return d;
}

// The word of a device::Counters that holds each counter.
nb::dict device_counters() {
  using device::Counters;
  nb::dict d;
  d["pages"] = offsetof(Counters, pages) / sizeof(u64);
  d["bad"] = offsetof(Counters, bad) / sizeof(u64);
  d["misses"] = offsetof(Counters, misses) / sizeof(u64);
  d["coalesced"] = offsetof(Counters, coalesced) / sizeof(u64);
  d["loads"] = offsetof(Counters, loads) / sizeof(u64);
  d["bypasses"] = offsetof(Counters, bypasses) / sizeof(u64);
  d["evictions"] = offsetof(Counters, evictions) / sizeof(u64);
  d["failures"] = offsetof(Counters, failures) / sizeof(u64);
  d["unresolved"] = offsetof(Counters, unresolved) / sizeof(u64);
  d["overflowed"] = offsetof(Counters, overflowed) / sizeof(u64);
  return d;
}

nb::dict value_types() {
  nb::dict d;
  d["unchanged"] = u64{unchanged};
  d["float32"] = u64{float32};
  d["float16"] = u64{float16};
  d["bfloat16"] = u64{bfloat16};
  d["int8_by_row"] = u64{int8_by_row};
  d["int8_by_column"] = u64{int8_by_column};
  return d;
}

nb::dict dict_of(const cache::PlannerStats& s) {
  nb::dict d;
  d["steps"] = s.steps;
  d["pages"] = s.pages;
  d["hits"] = s.hits;
  d["coalesced"] = s.coalesced;
  d["misses"] = s.pages - s.hits;
  d["loads"] = s.loads;
  d["bypasses"] = s.bypasses;
  d["evictions"] = s.evictions;
  d["failures"] = s.failures;
  return d;
}

class Clock {
 public:
  explicit Clock(double& sum) : sum_(sum), start_(std::chrono::steady_clock::now()) {}
  ~Clock() { sum_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  double& sum_;
  std::chrono::steady_clock::time_point start_;
};

nb::list list_of(const std::vector<Failure>& failures) {
  nb::list out;
  for (const Failure& f : failures) out.append(nb::make_tuple(f.file, f.offset, f.error));
  return out;
}

// A PageCache that owns a reference to every array its reads touch until they are complete. A forked child has
// neither its threads nor its memory, whose addresses may be others': there cancel() and the end do nothing, and what
// would read or mark a page throws std::runtime_error.
class OwningCache {
 public:
  OwningCache(std::shared_ptr<io::Engine> engine, std::shared_ptr<Workers> workers, u64 row_count, u32 row_bytes,
              u32 page_bytes, u32 rows_per_page, u32 shard_count, u32 first_file, u32 lines, const std::string& policy,
              u64 seed, std::optional<Bytes> heat, bool keep, std::optional<Checksums> checksums, u64 stored_as,
              u64 wanted_as, u32 row_values, std::optional<Scales> scales)
      : checksums_(std::move(checksums)), scales_(std::move(scales)) {
    CacheOptions o;
    o.lines = lines;
    o.policy = policy_of(policy);
    o.seed = seed;
    o.keep = keep;
    if (heat) o.heat = {heat->data(), heat->size()};
    if (checksums_) o.checksums = {checksums_->data(), checksums_->size()};
    o.form.from = static_cast<ValueType>(stored_as);
    o.form.to = static_cast<ValueType>(wanted_as);
    o.form.values = row_values;
    if (scales_) o.form.scales = {scales_->data(), scales_->size()};
    const Geometry g{row_count, row_bytes, page_bytes, rows_per_page, shard_count, first_file};
    cache_ = std::make_unique<PageCache>(std::move(engine), std::move(workers), g, o);
  }
  ~OwningCache() {
    if (forked()) {
      (void)cache_.release();
      return;
    }
    nb::gil_scoped_release release;
    cache_.reset();  // waits for reads; only then may the arrays go
  }

  void check(const Ids& ids) const {
    nb::gil_scoped_release release;
    Planner::check(span_of(ids), cache_->geometry().row_count);
  }

  u64 enter(u64 step, const Ids& ids) {
    refuse_forked();
    Clock clock(enter_s_);
    {
      nb::gil_scoped_release release;
      cache_->enter(step, span_of(ids));
    }
    publish();
    return cache_->planner().step(step).pages.size();
  }

  void plan(u64 step, Ids ids, Rows out) {
    refuse_forked();
    check_output(ids, out);
    Clock clock(plan_s_);
    {
      nb::gil_scoped_release release;
      cache_->plan(step, span_of(ids), bytes_of(out));
    }
    held_.insert_or_assign(step, Held{std::move(ids), std::move(out)});
    publish();
  }

  void gather_ready(u64 step) {
    refuse_forked();
    {
      Clock clock(gather_s_);
      nb::gil_scoped_release release;
      cache_->gather_ready(step);
    }
    publish();
  }

  void wait(u64 step) {
    refuse_forked();
    Clock clock(wait_s_);
    for (;;) {
      bool complete;
      {
        nb::gil_scoped_release release;
        complete = cache_->wait_for(step, 100);
      }
      if (complete) return;
      heed_signals();
    }
  }

  nb::list gather_rest(u64 step) {
    refuse_forked();
    std::vector<Failure> failures;
    {
      Clock clock(gather_s_);
      nb::gil_scoped_release release;
      failures = cache_->gather_rest(step, heed_signals);
    }
    return list_of(failures);
  }

  void retire(u64 step) {
    refuse_forked();
    Clock clock(retire_s_);
    {
      nb::gil_scoped_release release;
      cache_->retire(step);
    }
    held_.erase(step);
    publish();
  }

  // Two threads may call it: one drops the stream whose steps are live, and another one frees the cache.
  u64 cancel() {
    if (forked()) return cache_->planner().entered();
    u64 next;
    {
      nb::gil_scoped_release release;
      std::lock_guard lock(cancel_mutex_);
      next = cache_->cancel();
    }
    held_.clear();
    publish();
    return next;
  }

  nb::list read_through(const Ids& ids, const Rows& out) {
    refuse_forked();
    check_output(ids, out);
    std::vector<Failure> failures;
    {
      nb::gil_scoped_release release;
      failures = cache_->read_through(span_of(ids), bytes_of(out), heed_signals);
    }
    return list_of(failures);
  }

  nb::dict stats() {
    nb::dict d = dict_of(stats_);
    d["enter_s"] = enter_s_;
    d["plan_s"] = plan_s_;
    d["wait_s"] = wait_s_;
    d["gather_s"] = gather_s_;
    d["retire_s"] = retire_s_;
    d["lines"] = cache_->planner().line_count();
    d["lines_bytes"] = cache_->lines_bytes();
    d["line_metadata_bytes"] = cache_->planner().line_bytes();
    d["page_table_bytes"] = cache_->planner().table_bytes();
    d["step_bytes"] = step_bytes_;
    return d;
  }

  size_t plan_bytes() const { return plan_bytes_; }

  Planner& planner() {
    refuse_forked();
    return cache_->planner();
  }

 private:
  struct Held {
    Ids ids;
    Rows out;
  };

  static std::byte* bytes_of(const Rows& rows) { return reinterpret_cast<std::byte*>(rows.data()); }
  bool forked() const { return getpid() != pid_; }
  void refuse_forked() const {
    if (forked()) throw std::runtime_error("the cache was made before a fork: call gids.open() in this process");
  }
  // For stats() of other threads, which have the GIL while the planner may be at work without it.
  void publish() {
    stats_ = cache_->planner().stats();
    step_bytes_ = cache_->planner().step_bytes();
    plan_bytes_ = std::max(plan_bytes_, cache_->plan_bytes());
  }

  void check_output(const Ids& ids, const Rows& out) const {
    if (out.shape(0) != ids.size() || out.shape(1) != cache_->out_row_bytes())
      throw std::invalid_argument("out: expected " + std::to_string(ids.size()) + " rows of " +
                                  std::to_string(cache_->out_row_bytes()) + " bytes, got " +
                                  std::to_string(out.shape(0)) + " of " + std::to_string(out.shape(1)));
  }

  std::optional<Checksums> checksums_;
  std::optional<Scales> scales_;
  std::unordered_map<u64, Held> held_;
  std::unique_ptr<PageCache> cache_;
  std::mutex cancel_mutex_;
  const pid_t pid_ = getpid();
  cache::PlannerStats stats_;
  size_t step_bytes_ = 0, plan_bytes_ = 0;  // now, and at most
  double enter_s_ = 0, plan_s_ = 0, wait_s_ = 0, gather_s_ = 0, retire_s_ = 0;
};

nb::ndarray<nb::numpy, u8, nb::ndim<1>> take(const std::shared_ptr<BufferPool>& pool, u64 bytes, u64 room) {
  using Handle = std::shared_ptr<BufferPool::Buffer>;
  auto* handle = new Handle(pool->take(bytes, room));
  nb::capsule owner(handle, [](void* p) noexcept { delete static_cast<Handle*>(p); });
  return {reinterpret_cast<u8*>((*handle)->memory.data()), {static_cast<size_t>(bytes)}, owner};
}

}  // namespace

void bind_cache(nb::module_& m) {
  m.attr("USE_BITS") = word::use_bits;
  m.attr("HEAT_LEVELS") = word::heat_levels;
  m.attr("HEAT_SHIFT") = word::heat_shift;
  m.attr("LINE_SHIFT") = word::line_shift;
  m.attr("STATE_SHIFT") = word::state_shift;
  m.attr("ABSENT") = static_cast<u32>(PageState::absent);
  m.attr("RESIDENT") = static_cast<u32>(PageState::resident);
  m.attr("LINE_METADATA_BYTES") = cache::BucketLists::node_bytes;
  m.attr("LISTS_BYTES") = Planner::least_line_bytes();
  m.attr("PLANNED_ROW_BYTES") = cache::planned_row_bytes;
  m.attr("PLANNING_ROW_BYTES") = cache::planning_row_bytes;
  m.attr("MAX_LINES") = word::line_mask;
  m.attr("VALUE_TYPES") = value_types();
  m.attr("DEVICE_POLICIES") = device_policies();
  m.attr("DEVICE_COUNTERS") = device_counters();
  m.attr("DEVICE_COUNTER_WORDS") = sizeof(device::Counters) / sizeof(u64);
  m.attr("DEVICE_CHOICE_BYTES") = sizeof(device::Choice);
  m.def("device_candidates", &device::candidates, "lines"_a, "misses"_a,
        "Lines that a plan of the GPU cache looks at.");
  m.def("copy_as", &copy_as, "count"_a, "stored_as"_a, "wanted_as"_a, "RowCopy::as, from the items of a row copy.");

  nb::class_<Workers>(m, "Workers", "Threads that copy rows.")
      .def("__init__", [](Workers*, u32) { throw nb::type_error("use Workers.create"); })
      .def_static("create", [](u32 threads) { return share_here<Workers>(threads); }, "threads"_a);

  nb::class_<BufferPool>(m, "BufferPool", "Recycled, page-aligned output buffers.")
      .def("__init__", [](BufferPool*, u64) { throw nb::type_error("use BufferPool.create"); })
      .def_static("create", [](u64 keep) { return std::make_shared<BufferPool>(keep); }, "keep_bytes"_a)
      .def("take", &take, "bytes"_a, "room"_a = 0,
           "uint8[bytes]. The buffer returns to the pool with the last view of it. room: see the header.")
      .def("keep", &BufferPool::keep, "bytes"_a, "Changes keep_bytes.")
      .def_prop_ro("taken_bytes", &BufferPool::taken_bytes)
      .def_prop_ro("peak_bytes", &BufferPool::peak_bytes);

  nb::class_<Planner>(m, "Planner", "The metadata of a cache, without pages.")
      .def("__init__",
           [](Planner* self, u64 pages, u32 lines, const std::string& policy, u64 seed, std::optional<Bytes> heat,
              bool keep) {
             std::span<const u8> h;
             if (heat) h = {heat->data(), heat->size()};
             new (self) Planner(pages, lines, policy_of(policy), seed, h, keep);
           },
           "pages"_a, "lines"_a, "policy"_a = "lookahead", "seed"_a = 0, nb::arg("heat").noconvert() = nb::none(),
           "keep"_a = false)
      .def("enter",
           [](Planner& p, u64 step, const Ids& pages) {
             nb::gil_scoped_release release;
             return p.enter(step, span_of(pages), p.page_count(), 1).pages.size();
           },
           "step"_a, "pages"_a.noconvert(), "Marks a minibatch's pages. Returns the number of unique pages.")
      .def("plan",
           [](Planner& p, u64 step) {
             cache::Step* s;
             {
               nb::gil_scoped_release release;
               s = &p.plan(step);
               // Without I/O a load is complete at once.
               for (const cache::Load& l : p.loads()) word::publish(p.word(s->pages[l.index]));
             }
             return nb::make_tuple(s->hits, p.loads().size(), p.bypassed().size());
           },
           "step"_a, "Returns (hits, loads, bypasses) in pages.")
      .def("retire", [](Planner& p, u64 step) { nb::gil_scoped_release release; p.retire(step); }, "step"_a)
      .def("words",
           [](Planner& p) {
             return nb::ndarray<nb::numpy, const u64, nb::ndim<1>>(p.words().data(), {p.words().size()}, nb::handle());
           },
           nb::rv_policy::copy, "uint64[pages]: a copy of the page table.")
      .def("audit", &Planner::audit)
      .def("stats", [](const Planner& p) { return dict_of(p.stats()); });

  nb::class_<OwningCache>(m, "PageCache", "One table's cache in host memory. See gids.cache.")
      .def(nb::init<std::shared_ptr<io::Engine>, std::shared_ptr<Workers>, u64, u32, u32, u32, u32, u32, u32,
                    const std::string&, u64, std::optional<Bytes>, bool, std::optional<Checksums>, u64, u64, u32,
                    std::optional<Scales>>(),
           "engine"_a, "workers"_a, nb::kw_only(), "row_count"_a, "row_bytes"_a, "page_bytes"_a, "rows_per_page"_a,
           "shard_count"_a, "first_file"_a, "lines"_a, "policy"_a, "seed"_a = 0,
           nb::arg("heat").noconvert() = nb::none(), "keep"_a = false, nb::arg("checksums").noconvert() = nb::none(),
           "stored_as"_a = 0, "wanted_as"_a = 0, "row_values"_a = 0, nb::arg("scales").noconvert() = nb::none())
      .def("check", &OwningCache::check, "ids"_a.noconvert())
      .def("enter", &OwningCache::enter, "step"_a, "ids"_a.noconvert())
      .def("plan", &OwningCache::plan, "step"_a, "ids"_a.noconvert(), "out"_a.noconvert())
      .def("gather_ready", &OwningCache::gather_ready, "step"_a)
      .def("wait", &OwningCache::wait, "step"_a)
      .def("gather_rest", &OwningCache::gather_rest, "step"_a)
      .def("retire", &OwningCache::retire, "step"_a)
      .def("cancel", &OwningCache::cancel)
      .def("read_through", &OwningCache::read_through, "ids"_a.noconvert(), "out"_a.noconvert())
      .def("audit", [](OwningCache& c) { c.planner().audit(); })
      .def("words",
           [](OwningCache& c) {
             auto w = c.planner().words();
             return nb::ndarray<nb::numpy, const u64, nb::ndim<1>>(w.data(), {w.size()}, nb::handle());
           },
           nb::rv_policy::copy)
      .def("stats", &OwningCache::stats)
      .def_prop_ro("plan_bytes", &OwningCache::plan_bytes,
                   "Peak bytes of requests of planned steps and of memory to plan in.");
}

}  // namespace gids
