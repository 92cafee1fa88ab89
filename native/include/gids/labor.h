// Which edges LABOR-0 takes (Balin and Catalyurek, "Layer-Neighbor Sampling: Defusing Neighborhood Explosion in
// GNNs", NeurIPS 2023): every node t has one random number r_t in a layer, and a destination with d > k in-edges takes
// those with r_t < k / d. Destinations that share neighbors so tend to take the same. Shared by the host and the
// CUDA kernels.
#pragma once

#include "gids/random.h"
#include "gids/target.h"

namespace gids::labor {

// r_t as 64 bits; true with probability k / d to within 2^-64, without a division: bits * d < k * 2^64.
GIDS_HD bool is_taken(u64 bits, u64 degree, u64 fanout) { return random::below(bits, degree) < fanout; }

#if !GIDS_SIMT
// The same as bits < limit, for a destination with many in-edges. fanout < degree.
inline u64 limit(u64 degree, u64 fanout) {
  __extension__ using u128 = unsigned __int128;
  return fanout ? static_cast<u64>(((static_cast<u128>(fanout) << 64) - 1) / degree) + 1 : 0;
}
#endif

// The weight of a taken edge in a sum over all neighbors: 1 / its probability.
GIDS_HD float weight(u64 degree, u64 fanout) {
  return static_cast<float>(static_cast<double>(degree) / static_cast<double>(fanout));
}

}  // namespace gids::labor
