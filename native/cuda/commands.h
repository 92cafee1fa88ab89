// Work for one stream of a CUDA device, as words of 64 bits, that is enqueued by one call. Called by
// gids.cuda.cuda_device, which writes the words and gives the addresses of libcuda's functions. Knows no kernel, and
// needs neither CUDA nor a driver to compile.
#pragma once

#include <cstddef>
#include <span>

#include "gids/target.h"

namespace gids::cuda {

// The first word of a command is an Operation, the others are its operands. A launch has its arguments at the end: a
// word for each, of which the kernel takes as many bytes as its parameter has.
enum class Operation : u64 {
  launch,      // kernel, blocks, threads, number of arguments, arguments ...
  record,      // event
  wait_event,  // event
  wait_value,  // address on the device, value
  fill,        // address on the device, byte, bytes
  copy,        // to, from, bytes
};
constexpr std::size_t most_arguments = 64;

// Addresses of libcuda's functions, in the order of gids.cuda.driver.ENQUEUEING.
struct Functions {
  using Word = unsigned long long;  // CUdeviceptr, cuuint64_t
  int (*push_context)(void* context);
  int (*pop_context)(void** context);
  int (*launch)(void* kernel, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared_bytes,
                void* stream, void** arguments, void** extra);
  int (*record)(void* event, void* stream);
  int (*wait_event)(void* stream, void* event, unsigned flags);
  int (*fill)(Word to, unsigned char byte, std::size_t bytes, void* stream);
  int (*copy)(Word to, Word from, std::size_t bytes, void* stream);
  int (*wait_value)(void* stream, Word address, Word value, unsigned flags);
};
constexpr std::size_t function_count = 8;
static_assert(sizeof(Functions) == function_count * sizeof(void*), "Python passes an address for each");

// The first error, 0 if there is none, and the function that returned it: its index in Functions.
struct Result {
  int status;
  std::size_t function;
};

// Enqueues commands in order, until one fails. Throws std::invalid_argument for words that are no commands.
Result enqueue(const Functions& driver, void* context, void* stream, std::span<const u64> commands);

}  // namespace gids::cuda
