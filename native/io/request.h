// One request to the kernel: a run of neighboring reads of a batch. Filled and settled by Engine, issued
// by an engine's thread, which owns the object and its bounce slot.
#pragma once

#include <array>
#include <cstddef>

#include <sys/uio.h>

#include "io/engine.h"

namespace gids::io {

struct Request {
  static constexpr u32 reads_max = 64;

  Batch* batch = nullptr;
  u32 first = 0, count = 0;  // batch->reads[first, first + count)
  u32 file = 0;
  bool bounced = false;  // the enclosing aligned extent goes to the slot and is copied out
  u64 offset = 0;        // of the extent in the file
  u32 bytes = 0;         // of the extent
  u32 needed = 0;        // bytes from `offset` to the end of the last read; <= bytes
  u32 got = 0;           // bytes that have arrived
  u32 position = 0;      // where the next issue starts: `got`, rounded down to the alignment
  u32 attempts = 0;      // EINTR and EAGAIN so far
  u32 settled = 0;       // reads whose done() was called
  int error = 0;         // of the reads beyond `got`
  u64 issued_ns = 0;
  std::byte* slot = nullptr;
  std::array<iovec, reads_max> iov;

  const Read& read(u32 i) const { return batch->reads[first + i]; }
  // Fills iov for the bytes from `position` on; returns the number of entries. Pieces that are adjacent in
  // memory share one.
  u32 scatter();
};

}  // namespace gids::io
