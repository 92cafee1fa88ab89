#include "sampler/bulk.h"

#include <exception>
#include <string>

namespace gids::sampler {

namespace {

// The same error, and whose it is.
[[noreturn]] void throw_at(const std::exception_ptr& error, u64 step) {
  const std::string where = "step " + std::to_string(step) + ": ";
  try {
    std::rethrow_exception(error);
  } catch (const std::out_of_range& e) {
    throw std::out_of_range(where + e.what());
  } catch (const BadTopology& e) {
    throw BadTopology(where + e.what());
  } catch (const std::length_error& e) {
    throw std::length_error(where + e.what());
  }
}

}  // namespace

Bulk::Bulk(u32 threads, size_t keep_bytes)
    : pool_(std::make_shared<cache::BufferPool>(keep_bytes)), together_(threads, pool_), apart_(threads) {}

std::vector<Minibatch> Bulk::make(size_t count, u64 first_step, const Make& make) {
  std::vector<Minibatch> made;
  if (count == 1) {
    made.push_back(make(together_, 0));
    return made;
  }
  const u32 threads = together_.host.workers().threads();
  if (threads > 1 && 2 * count >= threads) return make_apart(count, first_step, make);
  made.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    try {
      made.push_back(make(together_, i));
    } catch (...) {
      throw_at(std::current_exception(), first_step + i);
    }
  }
  return made;
}

std::vector<Minibatch> Bulk::make_apart(size_t count, u64 first_step, const Make& make) {
  std::vector<Minibatch> made(count);
  std::vector<std::exception_ptr> errors(count);
  FirstFault failed;
  together_.host.workers().parallel_for(count, 1, [&](size_t first, size_t last, u32 worker) {
    for (size_t i = first; i < last && i < failed.at(); ++i) {
      try {
        if (!apart_[worker]) apart_[worker] = std::make_unique<Samplers>(1, pool_);
        made[i] = make(*apart_[worker], i);
      } catch (...) {
        errors[i] = std::current_exception();
        failed.note(i);
      }
    }
  });
  if (failed.at() != FirstFault::none) throw_at(errors[failed.at()], first_step + failed.at());
  return made;
}

size_t Bulk::scratch_bytes() const {
  size_t total = together_.bytes();
  for (const auto& samplers : apart_)
    if (samplers) total += samplers->bytes();
  return total;
}

}  // namespace gids::sampler
