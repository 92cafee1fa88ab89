#include "io/pool.h"

#include <algorithm>
#include <memory>

#include "io/file.h"
#include "io/request.h"

namespace gids::io {

// A thread has one request in flight, so the depth is the number of threads: by default as many readers as requests
// are asked for, or one per core where reading is copying (mmap).
Options PoolEngine::settle_options(Kind kind, Options o) {
  const u32 wanted = o.threads               ? o.threads
                     : kind == Kind::threads ? std::min(o.depth, threads_max)
                                             : std::max(1u, std::thread::hardware_concurrency());
  o.threads = std::min(wanted, o.depth);
  o.depth = o.threads;
  if (kind == Kind::mmap) o.direct = false;
  return o;
}

PoolEngine::PoolEngine(Kind kind, const std::vector<std::string>& paths, Options options)
    : Engine(kind == Kind::threads ? "threads" : "mmap", paths, settle_options(kind, options)),
      kind_(kind),
      bounce_(options_.depth, slot_bytes_) {
  bounce_bytes_ = bounce_.bytes();
  if (kind == Kind::mmap)
    for (File& file : files_) file.map();
  add_note(std::to_string(options_.threads) + (kind == Kind::mmap ? " threads that fault pages in" : " threads"));
  std::vector<std::function<void(const Ready&)>> bodies;
  for (u32 i = 0; i < options_.threads; ++i)
    bodies.push_back([this, slot = bounce_.slot(i)](const Ready& ready) {
      ready(nullptr);
      serve(slot);
    });
  start(std::move(bodies));
}

void PoolEngine::serve(std::byte* slot) {
  const auto request = std::make_unique<Request>();
  request->slot = slot;
  Request* const q = request.get();
  while (true) {
    Request* taken[] = {q};
    if (take(taken, true) == 0) {
      if (drained()) return;
      continue;
    }
    const File& file = files_[q->file];
    Stats tally;
    i64 result;
    do {
      const int n = static_cast<int>(q->scatter());
      const u64 at = q->offset + q->position;
      result = kind_ == Kind::mmap ? file.copy(q->iov.data(), n, at) : file.read(q->iov.data(), n, at);
    } while (!advance(*q, result, tally));
    settle(*q, tally);
    finish(taken, tally);
  }
}

}  // namespace gids::io
