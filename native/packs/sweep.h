// One ascending pass over a table, in large reads, that makes the copies of an annex plan and gives them to a Writer.
// Called by bind/. Runs in a thread of its own. Knows rows, pages and files.
//
// The table is read a chunk at a time, several ahead. Threads copy: each has the runs of one lane, the steps t with the
// same t % threads. Every run has one buffer of the writer's, its group. A full group is written at once.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "cache/memory.h"
#include "cache/workers.h"
#include "io/engine.h"
#include "packs/annex_plan.h"
#include "packs/writer.h"

namespace gids::packs {

struct AnnexSweepOptions {
  u32 chunks = 16;              // in memory
  u32 gap_bytes = 16u << 10;    // unwanted bytes of a shard that are read rather than skipped
  std::span<const u32> checksums = {};  // CRC32C of each page of the table; empty: not compared
  std::shared_ptr<const Cancel> cancel = {};
};

class AnnexSweep {
 public:
  // Starts at once. uses: that were planned. The writer's buffers must hold a group each, and be more than the steps
  // that miss rows. Throws std::invalid_argument.
  AnnexSweep(std::shared_ptr<io::Engine> engine, std::shared_ptr<Writer> writer,
             std::shared_ptr<cache::Workers> workers, std::shared_ptr<const Uses> uses,
             std::shared_ptr<const AnnexPlan> plan, const AnnexSweepOptions& options);
  ~AnnexSweep();  // ends it
  AnnexSweep(const AnnexSweep&) = delete;
  AnnexSweep& operator=(const AnnexSweep&) = delete;

  bool wait_for(u32 timeout_ms);  // true soon after Cancel::wanted, with ECANCELED

  // The rest only once wait_for() was true.
  enum class Failed { nothing, table, annex };  // which of the files
  struct Result {
    int error = 0;  // 0, ECANCELED, EBADMSG for a wrong checksum, or another errno. Then the annex is not usable.
    Failed failed = Failed::nothing;
    u32 file = 0;     // of the engine, or of the writer
    u64 offset = 0;   // of the page in the table's file
    u64 bytes_read = 0, bytes_written = 0, busy_ns = 0;
  };
  const Result& result() const { return result_; }
  size_t memory_bytes() const { return memory_.bytes(); }

 private:
  struct Chunk;
  struct Copy {
    u32 row;  // of the chunk
    u32 step;
  };
  struct Wanted {  // of a run: rows whose chunks were not submitted yet
    std::vector<u32> rows;
    size_t at = 0;  // in `rows`
    u64 read = 0;   // of the run's rows
  };
  struct Group {  // of a run: the buffer that is filled
    std::byte* buffer = nullptr;
    u64 number = 0;
    u64 rows = 0;  // so far
  };

  void run() noexcept;
  void sweep();
  bool submit_next();
  bool find_copies(Chunk& chunk);
  void add_reads(Chunk& chunk);
  void verify(const Chunk& chunk);
  void copy_lane(const Chunk& chunk, u32 lane);
  void write(u32 step, Group& group);
  bool cancelled() const { return ends_.wanted || (options_.cancel && options_.cancel->wanted); }
  void fail(int error, Failed failed, u32 file, u64 offset);
  bool stopped() const { return cancelled() || result_.error || writer_->error(); }

  std::shared_ptr<io::Engine> engine_;
  std::shared_ptr<Writer> writer_;
  std::shared_ptr<cache::Workers> workers_;
  std::shared_ptr<const Uses> uses_;
  std::shared_ptr<const AnnexPlan> plan_;
  const AnnexSweepOptions options_;
  const size_t chunk_bytes_;
  HugeArray<std::byte> memory_;  // chunk c is in place c % chunks
  std::vector<Wanted> wanted_;   // [step]
  std::vector<Group> groups_;    // [step]
  std::deque<Chunk> reading_;
  u64 next_chunk_ = 0, taken_ = 0;  // chunk to look at next; how many were read
  u64 listed_ = 0;                  // copies of the chunks in memory
  Cancel ends_;  // with the object
  Result result_;
  std::mutex mutex_;
  std::condition_variable cv_;
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace gids::packs
