// Random numbers by counting: what a node draws is a function of where it is drawn (seed, epoch, step, layer,
// relation, node, number of the draw), so neither the order of work nor the device matters. Philox4x32-10 (Salmon
// et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Shared by the host and the CUDA kernels.
#pragma once

#include "gids/target.h"

namespace gids::random {

struct Words {
  u32 w[4];
};

constexpr u32 rounds = 10;
constexpr u32 key_step = 0x9E3779B9;
constexpr u32 philox2_multiplier = 0xD256D193;

GIDS_HD constexpr Words philox(Words c, u64 key) {
  u32 k0 = static_cast<u32>(key), k1 = static_cast<u32>(key >> 32);
  for (u32 i = 0; i < rounds; ++i) {
    const u64 a = u64{0xD2511F53} * c.w[0], b = u64{0xCD9E8D57} * c.w[2];
    c = {{static_cast<u32>(b >> 32) ^ c.w[1] ^ k0, static_cast<u32>(b), static_cast<u32>(a >> 32) ^ c.w[3] ^ k1,
          static_cast<u32>(a)}};
    k0 += key_step;
    k1 += 0xBB67AE85;
  }
  return c;
}

GIDS_HD constexpr u64 low_half(Words c) { return c.w[0] | u64{c.w[1]} << 32; }
GIDS_HD constexpr u64 high_half(Words c) { return c.w[2] | u64{c.w[3]} << 32; }
GIDS_HD constexpr Words counter(u64 a, u64 b) {
  return {{static_cast<u32>(a), static_cast<u32>(a >> 32), static_cast<u32>(b), static_cast<u32>(b >> 32)}};
}

// The key of everything drawn for one minibatch, and from it that of one layer (0: next to the seeds) and relation.
GIDS_HD constexpr u64 minibatch_key(u64 seed, u64 epoch, u64 step) {
  return low_half(philox(counter(epoch, step), seed));
}
GIDS_HD constexpr u64 layer_key(u64 minibatch, u32 layer, u32 relation) {
  return low_half(philox(counter(layer, relation), minibatch));
}

// Draws 2 i and 2 i + 1 of a node are the two halves of this.
GIDS_HD constexpr Words draw_pair(u64 layer_key, u64 node, u32 i) { return philox(counter(node, i), layer_key); }
GIDS_HD constexpr u64 draw(u64 layer_key, u64 node, u32 i) {
  const Words pair = draw_pair(layer_key, node, i / 2);
  return i % 2 ? high_half(pair) : low_half(pair);
}

// Philox2x32-10: 64 bits for 64 bits, at half the work.
GIDS_HD constexpr u64 philox2(u64 counter, u32 key) {
  u32 c0 = static_cast<u32>(counter), c1 = static_cast<u32>(counter >> 32);
  for (u32 i = 0; i < rounds; ++i) {
    const u64 product = u64{philox2_multiplier} * c0;
    c0 = static_cast<u32>(product >> 32) ^ key ^ c1;
    c1 = static_cast<u32>(product);
    key += key_step;
  }
  return c0 | u64{c1} << 32;
}

// The one number that a node (its id below 2^32) has in a layer, for samplers whose nodes are drawn for as sources.
GIDS_HD constexpr u64 node_number(u64 layer_key, u64 node) {
  return philox2(node | (layer_key >> 32 << 32), static_cast<u32>(layer_key));
}

// A number in [0, bound) from 64 random bits; each comes up with probability 1 / bound to within 2^-64.
GIDS_HD u64 below(u64 bits, u64 bound) {
#if GIDS_SIMT
  return __umul64hi(bits, bound);
#else
  __extension__ using u128 = unsigned __int128;
  return static_cast<u64>(static_cast<u128>(bits) * bound >> 64);
#endif
}

}  // namespace gids::random
