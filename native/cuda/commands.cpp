#include "cuda/commands.h"

#include <array>
#include <stdexcept>

namespace gids::cuda {
namespace {

void* pointer(u64 word) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(word)); }

// The operands of the next command.
class Reader {
 public:
  explicit Reader(std::span<const u64> words) : left_(words) {}
  bool done() const { return left_.empty(); }
  std::span<const u64> take(u64 count) {
    if (count > left_.size()) throw std::invalid_argument("enqueue: a command is cut off");
    const auto taken = left_.first(count);
    left_ = left_.subspan(count);
    return taken;
  }

 private:
  std::span<const u64> left_;
};

int launch(const Functions& driver, void* stream, Reader& words) {
  const auto of = words.take(4);
  const auto arguments = words.take(of[3]);
  if (arguments.size() > most_arguments) throw std::invalid_argument("enqueue: a kernel has too many arguments");
  std::array<void*, most_arguments> addresses;
  for (std::size_t i = 0; i < arguments.size(); ++i) addresses[i] = const_cast<u64*>(&arguments[i]);
  return driver.launch(pointer(of[0]), static_cast<unsigned>(of[1]), 1, 1, static_cast<unsigned>(of[2]), 1, 1, 0,
                       stream, addresses.data(), nullptr);
}

Result run(const Functions& driver, void* stream, Reader words) {
  while (!words.done()) {
    Result result{};
    switch (static_cast<Operation>(words.take(1)[0])) {
      case Operation::launch: result = {launch(driver, stream, words), 2}; break;
      case Operation::record: result = {driver.record(pointer(words.take(1)[0]), stream), 3}; break;
      case Operation::wait_event: result = {driver.wait_event(stream, pointer(words.take(1)[0]), 0), 4}; break;
      case Operation::fill: {
        const auto of = words.take(3);
        result = {driver.fill(of[0], static_cast<unsigned char>(of[1]), of[2], stream), 5};
        break;
      }
      case Operation::copy: {
        const auto of = words.take(3);
        result = {driver.copy(of[0], of[1], of[2], stream), 6};
        break;
      }
      case Operation::wait_value: {  // flags: GEQ, and no flush: the host wrote the data before the word
        const auto of = words.take(2);
        result = {driver.wait_value(stream, of[0], of[1], 0), 7};
        break;
      }
      default: throw std::invalid_argument("enqueue: no such command");
    }
    if (result.status) return result;
  }
  return {};
}

}  // namespace

Result enqueue(const Functions& driver, void* context, void* stream, std::span<const u64> commands) {
  if (const int status = driver.push_context(context)) return {status, 0};
  Result result{};
  try {
    result = run(driver, stream, Reader(commands));
  } catch (...) {
    driver.pop_context(&context);
    throw;
  }
  const int popped = driver.pop_context(&context);
  return result.status ? result : Result{popped, 1};
}

}  // namespace gids::cuda
