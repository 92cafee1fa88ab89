// What all engines share: the queue, merging, completion, faults, statistics, closing.
#include "io/engine.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <future>
#include <stdexcept>

#include <unistd.h>

#include "io/clock.h"
#include "io/file.h"
#include "io/request.h"
#include "io/start_thread.h"

namespace gids::io {
namespace {

constexpr u32 attempts_max = 16;  // EINTR and EAGAIN of one request

u64 align_down(u64 a, u64 b) { return a - a % b; }
bool transient(int error) { return error == EINTR || error == EAGAIN; }

constexpr size_t first_part = 4096;  // reads of a large batch that are sorted before the first one is issued
constexpr size_t sorted_at_once = 2 * first_part;  // reads of a batch that is not large

// Keeps the order within a file.
void group_by_file(std::vector<Read>& reads, u32 file_count) {
  if (file_count == 1) return;
  std::vector<size_t> next(file_count + 1);
  for (const Read& r : reads) ++next[r.file + 1];
  for (u32 f = 0; f < file_count; ++f) next[f + 1] += next[f];
  std::vector<Read> grouped(reads.size());
  for (const Read& r : reads) grouped[next[r.file]++] = r;
  reads.swap(grouped);
}

[[noreturn]] void refuse(const Read& r, const std::string& why) {
  throw std::invalid_argument("read of " + std::to_string(r.bytes) + " B at " + std::to_string(r.offset) + ": " + why);
}

}  // namespace

bool Batch::wait_for(u32 timeout_ms) {
  if (finished()) return true;
  std::unique_lock lock(mutex_);
  return cv_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] { return finished(); });
}

void Batch::wait() {
  std::unique_lock lock(mutex_);
  cv_.wait(lock, [this] { return finished(); });
}

void Batch::complete(u32 count) {
  if (count == 0 || left_.fetch_sub(count, std::memory_order_acq_rel) != count + 1) return;
  const std::shared_ptr<Batch> alive = std::move(self_);  // before 0 is visible: the batch may be used again then
  std::lock_guard lock(mutex_);
  left_.store(0, std::memory_order_release);
  cv_.notify_all();
}

Engine::Engine(std::string name, const std::vector<std::string>& paths, const Options& options)
    : options_(options), pid_(getpid()), name_(std::move(name)), file_count_(static_cast<u32>(paths.size())) {
  files_.reserve(paths.size());
  if (!options_.descriptors.empty() && options_.descriptors.size() != paths.size())
    throw std::invalid_argument("there must be one descriptor per path, or none");
  for (size_t i = 0; i < paths.size(); ++i) {
    files_.emplace_back(paths[i], options_.direct, options_.descriptors.empty() ? -1 : options_.descriptors[i]);
    memory_alignment_ = std::max(memory_alignment_, files_.back().memory_alignment());
    alignment_ = std::max({alignment_, files_.back().alignment(), memory_alignment_});
  }
  options_.descriptors.clear();  // the caller closes them
  // An extent that starts and ends amid two blocks is longer than its bytes by almost two blocks.
  slot_bytes_ = static_cast<u32>(align_up(options_.max_read_bytes, alignment_));
  if (alignment_ > 1) slot_bytes_ += alignment_;
  note_ =
      options_.direct ? "direct I/O in units of " + std::to_string(alignment_) + " B" : "buffered by the page cache";
}

Engine::~Engine() = default;

// --- submission ---

void Engine::submit(std::shared_ptr<Batch> batch) {
  if (getpid() != pid_)
    throw std::runtime_error("the I/O engine was opened before a fork: call gids.open() in this process");
  std::vector<Read>& reads = batch->reads;
  if (!batch->finished())
    throw std::logic_error("the batch is still being read: wait until it has finished before submitting it again");
  if (reads.size() >= ~0u) throw std::invalid_argument("a batch must have fewer than 2^32 reads");
  for (const Read& r : reads) {
    if (r.file >= file_count_) refuse(r, "file " + std::to_string(r.file) + " of " + std::to_string(file_count_));
    if (r.bytes == 0 || r.bytes > options_.max_read_bytes)
      refuse(r, "the engine was opened for 1 to " + std::to_string(options_.max_read_bytes) + " B (max_read_bytes)");
    if (r.offset > offset_max) refuse(r, "the offset is beyond any file");
  }
  auto before = [](const Read& a, const Read& b) { return a.file != b.file ? a.file < b.file : a.offset < b.offset; };
  const bool in_parts = reads.size() > sorted_at_once && !std::is_sorted(reads.begin(), reads.end(), before);
  if (in_parts) {
    group_by_file(reads, file_count_);
  } else if (!std::is_sorted(reads.begin(), reads.end(), before)) {
    std::sort(reads.begin(), reads.end(), before);
  }
  std::vector<Batch::Run> left, part;  // of each file, what is not queued yet, and what is queued next
  for (u32 i = 0; i < reads.size(); ++i) {
    if (i == 0 || reads[i].file != reads[i - 1].file) left.push_back({i, i});
    left.back().end = i + 1;
  }
  {
    std::lock_guard lock(queue_mutex_);
    if (closing_) throw std::runtime_error("the I/O engine is closed");
    if (reads.empty()) return;
    batch->runs_.clear();
    batch->runs_.reserve(left.size());
    batch->turn_ = 0;
    if (in_parts) part.resize(left.size());
    batch->left_.store(reads.size() + 1, std::memory_order_relaxed);
    batch->self_ = batch;
    if (!in_parts) {
      try {
        return queue(*batch, left);
      } catch (...) {  // bad_alloc: nothing of the batch is queued, and who waits for it must not wait
        batch->left_.store(0, std::memory_order_relaxed);
        batch->self_.reset();
        throw;
      }
    }
    ++submitting_;
  }
  // A large batch is sorted in parts, each with reads of every file, while those before it are read.
  for (u64 size = first_part, rest = reads.size(); rest; size *= 4) {
    const u64 of = rest;
    for (size_t f = 0; f < left.size(); ++f) {
      const u64 of_file = left[f].end - left[f].begin;
      const u32 count = static_cast<u32>(std::min(of_file, div_ceil(of_file * size, of)));
      part[f] = {left[f].begin, left[f].begin + count};
      std::nth_element(&reads[part[f].begin], reads.data() + part[f].end, reads.data() + left[f].end, before);
      std::sort(reads.data() + part[f].begin, reads.data() + part[f].end, before);
      left[f].begin = part[f].end;
      rest -= count;
    }
    std::lock_guard lock(queue_mutex_);
    queue(*batch, part);
    if (rest == 0) --submitting_;
  }
}

// Adds sorted reads to a batch's runs. The queue mutex is held.
void Engine::queue(Batch& batch, std::span<const Batch::Run> parts) {
  if (batch.runs_.empty()) queue_.push_back(&batch);
  for (const Batch::Run& part : parts) {
    if (part.begin == part.end) continue;
    const auto before = std::find_if(batch.runs_.begin(), batch.runs_.end(), [&](const Batch::Run& run) {
      return run.end == part.begin && batch.reads[run.begin].file == batch.reads[part.begin].file;
    });
    if (before == batch.runs_.end()) batch.runs_.push_back(part);
    else before->end = part.end;
  }
  queue_cv_.notify_all();
  ring_doorbells();
}

void Engine::cancel(Batch& batch) {
  std::vector<Batch::Run> runs;
  {
    std::lock_guard lock(queue_mutex_);
    const auto at = std::find(queue_.begin(), queue_.end(), &batch);
    if (at == queue_.end()) return;
    queue_.erase(at);
    runs.swap(batch.runs_);
  }
  u32 cancelled = 0;
  for (const Batch::Run& run : runs) {
    for (u32 i = run.begin; i < run.end; ++i) batch.done(batch.reads[i], nullptr, ECANCELED);
    cancelled += run.end - run.begin;
  }
  batch.complete(cancelled);
}

void Engine::wait(Batch& batch, const std::function<void()>& check) {
  while (!batch.wait_for(100)) {
    try {
      check();
    } catch (...) {
      cancel(batch);
      batch.wait();
      throw;
    }
  }
}

// --- the queue's other end ---

bool Engine::aligned(const Read& r) const {
  return ((r.offset | r.bytes) & (alignment_ - 1)) == 0 &&
         (reinterpret_cast<uintptr_t>(r.dest) & (memory_alignment_ - 1)) == 0;
}

// Fills one request from the head of the queue. The queue mutex is held.
bool Engine::next(Request& q) {
  q.got = q.position = q.attempts = q.settled = 0;
  q.error = 0;
  u32 limit = Request::reads_max;  // reads of this request, at most
  Batch::Run alone;
  Batch::Run* run = &alone;
  if (!again_.empty()) {
    q.batch = again_.front().batch;
    alone = {again_.front().index, again_.front().index + 1};
    again_.pop_front();
  } else if (!queue_.empty()) {
    q.batch = queue_.front();
    run = &q.batch->runs_[q.batch->turn_];
    limit = std::min(limit, options_.max_merge_bytes ? run->end - run->begin : 1);
  } else {
    return false;
  }
  q.first = run->begin;
  q.count = 1;
  limit = std::min(limit, run->end - run->begin);
  const Read* reads = &q.batch->reads[q.first];
  q.file = reads[0].file;
  q.bounced = !aligned(reads[0]);
  u64 end = reads[0].offset + reads[0].bytes;
  if (q.bounced) {
    q.offset = align_down(reads[0].offset, alignment_);
    u64 extent_end = align_up(end, alignment_);
    while (q.count < limit) {  // reads that touch the extent join it: each block is read once
      const Read& r = reads[q.count];
      const u64 longer = std::max(extent_end, align_up(r.offset + r.bytes, alignment_));
      if (r.offset > extent_end || aligned(r) || longer - q.offset > slot_bytes_) break;
      if (longer > extent_end && longer - q.offset > options_.max_merge_bytes) break;
      extent_end = longer;
      end = std::max(end, r.offset + r.bytes);
      ++q.count;
    }
    q.bytes = static_cast<u32>(extent_end - q.offset);
  } else {
    q.offset = reads[0].offset;
    u64 slot_used = reads[0].dest ? 0 : reads[0].bytes;
    while (q.count < limit) {
      const Read& r = reads[q.count];
      slot_used += r.dest ? 0 : r.bytes;
      if (r.offset != end || !aligned(r) || slot_used > slot_bytes_) break;
      if (end + r.bytes - q.offset > options_.max_merge_bytes) break;
      end += r.bytes;
      ++q.count;
    }
    q.bytes = static_cast<u32>(end - q.offset);
  }
  q.needed = static_cast<u32>(end - q.offset);
  if (run == &alone) return true;

  Batch& b = *q.batch;
  run->begin += q.count;
  if (run->begin < run->end) {
    ++b.turn_;
  } else {
    b.runs_.erase(b.runs_.begin() + static_cast<std::ptrdiff_t>(b.turn_));
  }
  if (b.turn_ >= b.runs_.size()) b.turn_ = 0;
  if (b.runs_.empty()) queue_.pop_front();
  return true;
}

u32 Engine::take(std::span<Request*> into, bool wait, u64 chores) {
  u32 n = 0;
  {
    std::unique_lock lock(queue_mutex_);
    if (wait) queue_cv_.wait(lock, [&] { return closing_ || !queue_.empty() || !again_.empty() || chores_ != chores; });
    while (n < into.size() && next(*into[n])) ++n;
  }
  if (n == 0) return 0;
  const u64 now = now_ns();
  for (Request* q : into.first(n)) q->issued_ns = now;
  std::lock_guard lock(stats_mutex_);
  if (in_flight_ == 0) busy_since_ns_ = now;
  in_flight_ += n;
  stats_.depth_max = std::max(stats_.depth_max, in_flight_);
  return n;
}

bool Engine::drained() const {
  std::lock_guard lock(queue_mutex_);
  return closing_ && queue_.empty() && again_.empty() && submitting_ == 0;
}

// --- completion ---

bool Engine::advance(Request& q, i64 result, Stats& tally) {
  if (const int injected = faulty_.load(std::memory_order_relaxed) ? fault(q) : 0) result = -injected;
  if (result < 0) {
    if (transient(static_cast<int>(-result)) && ++q.attempts <= attempts_max) {
      ++tally.retries;
      return false;
    }
    q.error = static_cast<int>(-result);
    return true;
  }
  const u32 reached = q.position + static_cast<u32>(result);
  const bool progress = reached > q.got;
  if (progress) q.got = reached;
  if (q.got >= q.needed) return true;
  if (!progress) {
    q.error = ENODATA;
    return true;
  }
  // A direct read that ends amid a block has met the end of the file. Reading that block again tells it
  // for sure: no progress.
  q.position = static_cast<u32>(align_down(q.got, alignment_));
  ++tally.retries;
  return false;
}

void Engine::settle(Request& q, Stats& tally) {
  const bool faulty = faulty_.load(std::memory_order_relaxed);
  std::byte* bounce = q.slot;
  ++tally.requests;
  tally.bytes_read += q.bytes;
  for (u32 i = 0; i < q.count; ++i) {
    const Read& r = q.read(i);
    std::byte* data = r.dest;
    if (q.bounced) {
      data = q.slot + (r.offset - q.offset);
    } else if (!data) {
      data = bounce;
      bounce += r.bytes;
    }
    int error = r.offset + r.bytes - q.offset <= q.got ? 0 : q.error;
    if (error && error != ENODATA && q.count > 1) {  // whose error is it? ask for each read alone
      ++tally.retries;
      std::lock_guard lock(queue_mutex_);
      again_.push_back({q.batch, q.first + i});
      queue_cv_.notify_one();
      continue;
    }
    if (!error && faulty) error = fault(r);
    if (!error && q.bounced && r.dest) {
      std::memcpy(r.dest, data, r.bytes);
      data = r.dest;
    }
    q.batch->done(r, error ? nullptr : data, error);
    ++q.settled;
    ++tally.reads;
    tally.bytes_asked += r.bytes;
    tally.errors += error != 0;
  }
}

void Engine::finish(std::span<Request* const> settled, const Stats& tally) {
  if (settled.empty() && tally.retries == 0) return;
  const u64 now = now_ns();
  {
    std::lock_guard lock(stats_mutex_);
    stats_.reads += tally.reads;
    stats_.requests += tally.requests;
    stats_.bytes_asked += tally.bytes_asked;
    stats_.bytes_read += tally.bytes_read;
    stats_.errors += tally.errors;
    stats_.retries += tally.retries;
    for (const Request* q : settled) {
      stats_.latency_ns += now - q->issued_ns;
      latencies_.add(now - q->issued_ns);
    }
    in_flight_ -= static_cast<u32>(settled.size());
    if (in_flight_ == 0 && !settled.empty()) stats_.busy_ns += now - busy_since_ns_;
  }
  for (Request* q : settled) q->batch->complete(q->settled);
}

// --- threads ---

void Engine::start(std::vector<std::function<void(const Ready&)>> bodies) {
  std::vector<std::shared_ptr<std::promise<void>>> ready;
  std::exception_ptr failure;
  ready.reserve(bodies.size());
  threads_.reserve(bodies.size());
  try {
    for (auto& body : bodies) {
      auto promise = std::make_shared<std::promise<void>>();
      threads_.push_back(start_thread("gids-" + name_, [body = std::move(body), promise] {
        body([promise](std::exception_ptr failure) {
          if (failure) {
            promise->set_exception(failure);
          } else {
            promise->set_value();
          }
        });
      }));
      ready.push_back(std::move(promise));
    }
  } catch (...) {  // the threads that did start are ended below
    failure = std::current_exception();
  }
  for (auto& promise : ready) {
    try {
      promise->get_future().get();
    } catch (...) {
      failure = std::current_exception();
    }
  }
  if (!failure) return;
  close();
  std::rethrow_exception(failure);
}

void Engine::start_another(std::function<void()> body) {
  std::lock_guard lock(queue_mutex_);
  if (!closing_) threads_.push_back(start_thread("gids-" + name_, std::move(body)));
}

void Engine::close() {
  if (getpid() != pid_) return;
  std::lock_guard closing(close_mutex_);
  {
    std::lock_guard lock(queue_mutex_);
    closing_ = true;
    queue_cv_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  files_.clear();
}

// --- statistics, notes, faults ---

// A forked child has no thread that changes them, and a copy of the lock that nobody may ever unlock.
std::unique_lock<std::mutex> Engine::lock_stats() const {
  return getpid() == pid_ ? std::unique_lock(stats_mutex_) : std::unique_lock<std::mutex>();
}

Stats Engine::stats() const {
  const auto lock = lock_stats();
  Stats s = stats_;
  s.in_flight = in_flight_;
  s.threads = threads_in_use();
  if (in_flight_) s.busy_ns += now_ns() - busy_since_ns_;
  return s;
}

LatencyHistogram::Counts Engine::latencies() const {
  const auto lock = lock_stats();
  return latencies_.counts();
}

std::string Engine::note() const {
  const auto lock = lock_stats();
  return note_;
}

void Engine::add_note(const std::string& text) {
  std::lock_guard lock(stats_mutex_);
  if (note_.find(text) == std::string::npos) note_ += "; " + text;
}

void Engine::inject_faults(std::vector<Fault> faults) {
  std::lock_guard lock(fault_mutex_);
  faults_ = std::move(faults);
  faulty_.store(!faults_.empty(), std::memory_order_relaxed);
}

int Engine::fault(u32 file, u64 begin, u64 end, bool want_transient) {
  std::lock_guard lock(fault_mutex_);
  for (Fault& f : faults_) {
    if (f.file != file || f.offset < begin || f.offset >= end || f.times == 0) continue;
    if (transient(f.error) != want_transient) continue;
    --f.times;
    return f.error;
  }
  return 0;
}

int Engine::fault(const Request& q) { return fault(q.file, q.offset, q.offset + q.bytes, true); }
int Engine::fault(const Read& r) { return fault(r.file, r.offset, r.offset + r.bytes, false); }

}  // namespace gids::io
