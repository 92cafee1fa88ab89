// A histogram of request latencies with 16 buckets per factor of 2, so that a percentile is known to 1 part in 16
// from nanoseconds to hours. Owned and locked by Engine, which adds one count per request.
#pragma once

#include <array>
#include <bit>

#include "gids/target.h"

namespace gids::io {

class LatencyHistogram {
 public:
  static constexpr u32 steps = 16;    // buckets to a doubling
  static constexpr u32 octaves = 44;  // up to 2^44 ns, five hours; longer requests count as that
  static constexpr u32 buckets = steps * (octaves - 3);
  using Counts = std::array<u64, buckets>;

  void add(u64 ns) { ++counts_[bucket_of(ns)]; }
  const Counts& counts() const { return counts_; }

  // Below 16 ns a bucket is 1 ns wide; from there, a sixteenth of its octave.
  static constexpr u32 bucket_of(u64 ns) {
    if (ns < steps) return static_cast<u32>(ns);
    if (ns >= 1ull << octaves) return buckets - 1;
    const u32 octave = static_cast<u32>(std::bit_width(ns)) - 1;
    return steps * (octave - 3) + static_cast<u32>((ns >> (octave - 4)) & (steps - 1));
  }
  static constexpr u64 end_of(u32 bucket) {  // the least time that belongs to the next bucket
    const u32 next = bucket + 1;
    if (next < steps) return next;
    return u64{steps + next % steps} << (next / steps - 1);
  }

 private:
  Counts counts_{};
};
static_assert(LatencyHistogram::bucket_of(15) == 15 && LatencyHistogram::bucket_of(16) == 16);
static_assert(LatencyHistogram::end_of(LatencyHistogram::bucket_of(1000)) > 1000);
static_assert(LatencyHistogram::bucket_of(LatencyHistogram::end_of(200)) == 201);
static_assert(LatencyHistogram::bucket_of((1ull << 44) - 1) == LatencyHistogram::buckets - 1);

}  // namespace gids::io
