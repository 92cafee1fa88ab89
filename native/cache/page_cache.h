// The cache of one table: lines in host memory, filled by the I/O engine without a copy in between.
// Called by bind/ from one thread (the stream's), and by read_through from others. It composes the planner
// (which pages), the engine (reads) and the workers (copies); it knows nothing of samplers or frameworks.
//
// A step goes enter -> plan (submits reads) -> gather_ready -> wait -> gather_rest -> retire. Several steps
// may be planned before the first of them is gathered. Where memory is short, a step gets its output only at
// gather_ready: plan then reads what wins a line, and gather_rest what does not, a part at a time.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "cache/convert_rows.h"
#include "cache/geometry.h"
#include "cache/memory.h"
#include "cache/planner.h"
#include "cache/workers.h"
#include "io/engine.h"

namespace gids::cache {

// A page whose read failed twice; or, as ERANGE of the table's first file, a finite value that became infinite.
struct Failure {
  u32 file;
  u64 offset;
  int error;  // errno
};

struct CacheOptions {
  u32 lines = 0;
  Policy policy = Policy::lookahead;
  bool keep = false;  // pages of the highest heat keep their lines
  u64 seed = 0;
  std::span<const u8> heat;        // one byte per page, or empty
  std::span<const u32> checksums;  // CRC32C per page: every read is checked. Empty: not checked
  RowForm form;                    // how rows are handed out; row_bytes is the geometry's
};

// Upper bounds of the bytes of a planned minibatch, per row or page.
constexpr size_t planned_row_bytes = sizeof(io::Read) + 9;  // a row of a page that wins no line
constexpr size_t planning_row_bytes = 16;                   // of one minibatch at a time, for any hits and misses
constexpr size_t part_rows = 32 << 10;                      // rows that are read together past the cache
constexpr size_t parts_at_once = 2;                         // such reads at a time

class PageCache {
 public:
  PageCache(std::shared_ptr<io::Engine> engine, std::shared_ptr<Workers> workers, const Geometry& geometry,
            const CacheOptions& options);
  ~PageCache();  // waits for its reads
  PageCache(const PageCache&) = delete;
  PageCache& operator=(const PageCache&) = delete;

  void enter(u64 step, std::span<const i64> ids);

  // Plans the step and submits its reads. `ids`: as entered. `out`: ids.size() rows of the form. Both must stay valid
  // until the step retires, as pages without a line are read into `out`; if it throws they need not, but the step must
  // still be retired.
  void plan(u64 step, std::span<const i64> ids, std::byte* out);

  // Copies the rows whose pages are there already, while the rest is being read.
  void gather_ready(u64 step);
  bool wait_for(u64 step, u32 timeout_ms);  // true: all reads of the step are complete
  // Copies the other rows and repeats failed reads. Returns pages that failed twice; their rows are arbitrary.
  // check: see Engine::wait. When it throws, gather_ready may begin again.
  std::vector<Failure> gather_rest(u64 step, const std::function<void()>& check);
  void retire(u64 step);
  // Retires every live step, planned or not. Returns the first step that may be entered next.
  u64 cancel();

  // Rows without a step and without marks: from lines where resident, else from the shards, past the
  // cache. Any thread. ids are checked first (std::out_of_range). check: see Engine::wait.
  std::vector<Failure> read_through(std::span<const i64> ids, std::byte* out, const std::function<void()>& check);

  const Geometry& geometry() const { return geometry_; }
  u64 out_row_bytes() const { return form_.out_row_bytes(); }
  Planner& planner() { return planner_; }
  size_t lines_bytes() const { return lines_->bytes(); }
  size_t plan_bytes() const;  // reads of planned steps, and what planning and gathering need

 private:
  class Fill;
  struct Flight;  // a planned step: its ids, output and reads

  void submit(const Step& s, std::span<const i64> ids, std::byte* out);
  Flight& flight(u64 step);
  const std::byte* row_in_line(u64 word, i64 id) const {
    return lines_->data() + size_t{word::line_of(word)} * geometry_.page_bytes + geometry_.offset_in_page(id);
  }
  // Those of `positions` that are not copied stay in it. Returns whether a finite value became infinite.
  bool copy_resident(std::span<const i64> ids, std::byte* out, const Fill* fill, std::vector<u32>& positions);
  // overflowed: whether a finite value became infinite before.
  std::vector<Failure> read_past_cache(std::span<const i64> ids, std::byte* out, std::vector<u32> positions,
                                       bool overflowed, const std::function<void()>& check);

  std::shared_ptr<io::Engine> engine_;
  std::shared_ptr<Workers> workers_;
  Geometry geometry_;
  Planner planner_;
  std::shared_ptr<HugeArray<std::byte>> lines_;
  bool registered_ = false;  // lines_, with the engine
  std::span<const u32> checksums_;
  RowForm form_;
  std::mutex plan_mutex_;       // lines change hands only under it
  std::deque<Flight> flights_;  // planned, not retired
};

}  // namespace gids::cache
