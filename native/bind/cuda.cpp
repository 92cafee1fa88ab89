// Python's way to enqueue work on a stream of a CUDA device. Called by module.cpp; the user is gids.cuda.cuda_device.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>

#include <array>
#include <bit>
#include <cstdint>
#include <utility>

#include "bind/bind.h"
#include "cuda/commands.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gids {
namespace {

using Words = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Addresses = std::array<uintptr_t, cuda::function_count>;

std::pair<int, size_t> enqueue(const Addresses& functions, uintptr_t context, uintptr_t stream, const Words& commands) {
  static_assert(sizeof(uint64_t) == sizeof(u64));
  const auto* words = reinterpret_cast<const u64*>(commands.data());
  const std::span<const u64> all(words, commands.size());
  nb::gil_scoped_release release;
  const auto [status, function] = cuda::enqueue(std::bit_cast<cuda::Functions>(functions),
                                                reinterpret_cast<void*>(context), reinterpret_cast<void*>(stream), all);
  return {status, function};
}

}  // namespace

void bind_cuda(nb::module_& m) {
  m.def("enqueue", &enqueue, "functions"_a, "context"_a, "stream"_a, "commands"_a.noconvert(),
        "Enqueue commands (native/cuda/commands.h) on a stream, without the GIL. Returns (status, index of the "
        "function that returned it).");
}

}  // namespace gids
