// Chooses an engine by its name, or the best that this machine allows.
#include <cerrno>
#include <stdexcept>
#include <system_error>

#include <sys/resource.h>
#include <unistd.h>

#include "io/engine.h"
#include "io/file.h"
#include "io/pool.h"
#include "io/ring.h"
#include "io/uring.h"

namespace gids::io {
namespace {

constexpr u32 read_bytes_max = 1u << 30;  // the kernel reads less than 2 GiB at a time
constexpr u32 depth_max = 1u << 14;       // an io_uring holds twice as many

void check_range(const char* what, u32 value, u32 low, u32 high) {
  if (value >= low && value <= high) return;
  throw std::invalid_argument(std::string(what) + " must be " + std::to_string(low) + " to " + std::to_string(high) +
                              " (got " + std::to_string(value) + ")");
}

}  // namespace

std::string why_no_uring() {
  try {
    Ring ring(1);
    return "";
  } catch (const std::exception& e) {
    return e.what();
  }
}

std::shared_ptr<Engine> open_engine(const std::string& kind, const std::vector<std::string>& paths,
                                    const Options& options) {
  check_range("queue depth", options.depth, 1, depth_max);
  check_range("threads", options.threads, 0, threads_max);
  check_range("rings", options.rings, 1, threads_max);
  check_range("max_read_bytes", options.max_read_bytes, 1, read_bytes_max);
  check_range("max_merge_bytes", options.max_merge_bytes, 0, read_bytes_max);

  // Ends the threads before the parts of a derived class that they use. A forked child leaks the engine:
  // its threads are not there to be joined, and its locks may be held for ever.
  auto release = [pid = getpid()](Engine* engine) {
    if (getpid() != pid) return;
    engine->close();
    delete engine;
  };
  auto own = [&release](Engine* engine) { return std::shared_ptr<Engine>(engine, release); };
  if (kind == "uring") return own(new UringEngine(paths, options));
  if (kind == "threads") return own(new PoolEngine(PoolEngine::Kind::threads, paths, options));
  if (kind == "mmap") return own(new PoolEngine(PoolEngine::Kind::mmap, paths, options));
  if (kind != "auto")
    throw std::invalid_argument("the I/O engine must be one of auto, uring, threads, mmap (got '" + kind + "')");
  std::string obstacle;
  try {
    return own(new UringEngine(paths, options));
  } catch (const std::system_error& e) {
    rlimit files;  // which the caller raises if it can, and tries again
    if (e.code().value() == EMFILE && getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) throw;
    obstacle = e.what();
  }
  auto engine = own(new PoolEngine(PoolEngine::Kind::threads, paths, options));  // throws too if a file is at fault
  engine->add_note("not io_uring: " + obstacle);
  return engine;
}

}  // namespace gids::io
