// A controller that misbehaves: an Engine that makes pages up, completes them in any order, stalls, fails
// those that a rule names, and loses some until told. It plays the SSD in the tests of the request queue.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "io/engine.h"
#include "io/request.h"

namespace gids {

// What the page at (file, offset) holds: this, repeated.
inline u64 pattern(u32 file, u64 offset) { return (u64{file} + 1) << 40 ^ (offset + 1) * 0x9e3779b97f4a7c15u; }

struct Mischief {
  u32 fail_every = 0;      // pages whose offset / bytes is a multiple of it fail, with EIO or ENODATA; 0: none
  u32 stall_one_in = 0;    // passes that sleep a little; 0: none
  bool shuffle = false;    // completes in any order
  u64 lose_page = ~u64{0}; // of file 0: its completion is lost until find() or the end
  bool hold = false;       // completes nothing until find() or the end
  u64 seed = 1;

  int error(u64 page) const { return fail_every && page % fail_every == 0 ? (page % 2 ? EIO : ENODATA) : 0; }
};

class Controller final : public io::Engine {
 public:
  // The files are opened and not read.
  static std::shared_ptr<Controller> open(const std::vector<std::string>& paths, const Mischief& mischief,
                                          u32 depth = 256) {
    return {new Controller(paths, mischief, depth), [](Controller* c) {
              c->close();
              delete c;
            }};
  }
  void find() { found_ = true; }  // completions that were lost or held come now
  u64 lost() const { return lost_; }

 private:
  Controller(const std::vector<std::string>& paths, const Mischief& mischief, u32 depth)
      : Engine("controller", paths, {.depth = depth, .max_merge_bytes = 0, .direct = false}), mischief_(mischief) {
    start({[this](const Ready& ready) {
      ready(nullptr);
      serve();
    }});
  }

  void serve() {
    std::mt19937_64 random(mischief_.seed);
    std::vector<std::unique_ptr<io::Request>> requests(options_.depth);
    std::vector<io::Request*> idle, held, lost;
    for (auto& q : requests) idle.push_back((q = std::make_unique<io::Request>()).get());
    while (true) {
      const u32 n = take(idle, held.empty() && lost.empty());
      for (u32 i = 0; i < n; ++i) (is_lost(*idle[i]) ? lost : held).push_back(idle[i]);
      idle.erase(idle.begin(), idle.begin() + n);
      lost_ = lost.size();
      if (!lost.empty() && (found_ || drained())) {
        held.insert(held.end(), lost.begin(), lost.end());
        lost.clear();
      }
      if (held.empty()) {
        if (lost.empty() && drained()) return;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        continue;
      }
      if (mischief_.stall_one_in && random() % mischief_.stall_one_in == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
      if (mischief_.shuffle) std::shuffle(held.begin(), held.end(), random);
      const size_t count = mischief_.shuffle ? 1 + random() % held.size() : held.size();
      complete({held.end() - static_cast<std::ptrdiff_t>(count), held.end()});
      idle.insert(idle.end(), held.end() - static_cast<std::ptrdiff_t>(count), held.end());
      held.resize(held.size() - count);
    }
  }

  bool is_lost(const io::Request& q) const {
    if (found_) return false;
    return mischief_.hold || (q.file == 0 && q.offset / q.bytes == mischief_.lose_page);
  }

  void complete(const std::vector<io::Request*>& requests) {
    io::Stats tally;
    for (io::Request* q : requests) {
      const io::Read& read = q->read(0);
      const int error = mischief_.error(q->offset / q->bytes);
      if (!error) {
        const u64 word = pattern(q->file, q->offset);
        for (u32 i = 0; i < read.bytes; i += sizeof word) std::memcpy(read.dest + i, &word, sizeof word);
      }
      advance(*q, error ? -i64{error} : i64{q->bytes}, tally);
      settle(*q, tally);
    }
    finish(requests, tally);
  }

  const Mischief mischief_;
  std::atomic<bool> found_{false};
  std::atomic<u64> lost_{0};
};

}  // namespace gids
