// Disjoint trees: every seed of a minibatch has a tree of its own, and a node of two trees is drawn for twice. A tree
// draws by its tag, a function of its root and of the root's time, so that it depends on no other tree of the
// minibatch. Shared by the host and the CUDA kernels.
#pragma once

#include "gids/random.h"

namespace gids::forest {

constexpr u32 tag_key = 0x74726565;

// Roots of one type and id with the same time have the same tag: they draw the same tree.
GIDS_HD constexpr u32 tag(u32 node_type, u64 root, i64 time) {
  const u64 key = node_type | u64{tag_key} << 32;
  return random::philox(random::counter(root, static_cast<u64>(time)), key).w[0];
}

// The node, of an id below 2^32, as the random numbers of the tree's draws count it.
GIDS_HD constexpr u64 drawn_as(u64 node, u32 tag) { return node | u64{tag} << 32; }

}  // namespace gids::forest
