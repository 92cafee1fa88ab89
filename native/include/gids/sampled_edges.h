// What the sampling kernels share (native/sampler/*.cu): reading sources, noting what edges lead to, and a warp's
// choice of a node's in-edges with the least numbers. Knows memory only, wherever it lies. For device code alone.
//
// In one layer, each node type that edges come from has `known` nodes with local ids 0 ... known - 1. An edge of the
// layer has a place: base + its number among its relation's edges. Its source is noted in the type's id map at
// known + place. In disjoint minibatches nodes are keys of pair_map.h, a tree and an id, and so are those in the map.
#pragma once

#include "gids/forest.h"
#include "gids/id_map.h"
#include "gids/pair_map.h"
#include "gids/target.h"

#if GIDS_SIMT

namespace gids::sampled_edges {

constexpr u32 warp_lanes = 32;
constexpr u64 none = ~u64{0};

__device__ inline u64 thread_index() { return u64{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ inline u64 thread_count() { return u64{gridDim.x} * blockDim.x; }

// Keeps the least of what is noted; none: no fault.
__device__ inline void note_fault(u64* fault, u64 at) {
  id_map::lower(*fault, gids::local_ref<u64>(*fault).load(gids::memory_order_relaxed), at);
}

__device__ inline u64 read_source(const void* indices, u32 wide, u64 position) {
  return wide ? static_cast<u64>(static_cast<const i64*>(indices)[position])
              : static_cast<u64>(static_cast<i64>(static_cast<const int*>(indices)[position]));
}

// Where the edges of one relation come from, and where they go.
struct Edges {
  const void* indices;
  u32 wide, log2_slots;
  u64 num_src, known;
  u64* slots;
  u32* sources;
  i64* positions;
  u32* slot_of;
  const u32* tags;  // of the trees; null: there are no trees, and a node is its id. Else a node is a key of pair_map.h
  u64* fault;

  // The source of the edge at a position of the indices; 0, and a fault noted, where that is no node.
  __device__ u64 source(u64 position) const {
    const u64 source = read_source(indices, wide, position);
    if (source < num_src) return source;
    note_fault(fault, position);
    return 0;
  }
  // What a node's random numbers are numbered by. The node has in-edges.
  __device__ u64 drawn_as(i64 node) const {
    const u64 key = static_cast<u64>(node);
    return tags ? forest::drawn_as(pair_map::id_of(key), tags[pair_map::tree_of(key)]) : key;
  }
  // The edge at a place, of this destination, is the one at a position.
  __device__ void take(u64 place, u64 position, i64 node) const {
    const u64 source = this->source(position);
    sources[place] = static_cast<u32>(source);
    positions[place] = static_cast<i64>(position);
    slot_of[place] =
        tags ? pair_map::note(slots, log2_slots, pair_map::key(pair_map::tree_of(static_cast<u64>(node)), source),
                              known + place)
             : id_map::note(slots, log2_slots, source, known + place);
  }
};

// The in-edges with the least numbers so far, of one warp, in memory: each number and the edge's index at its node.
struct Least {
  u64* numbers;
  i64* edges;
  u32 count;

  // Which one is to go for a lesser: the greatest number, and of these the last edge.
  struct Greatest {
    u64 number, edge, at;
    __device__ bool operator<(const Greatest& other) const {
      return number < other.number || (number == other.number && edge < other.edge);
    }
  };
  __device__ Greatest greatest(u32 lane) const {
    Greatest found{0, 0, 0};
    for (u32 i = lane; i < count; i += warp_lanes) {
      const Greatest here{numbers[i], static_cast<u64>(edges[i]), i};
      if (found < here || i == lane) found = here;
    }
    for (int step = warp_lanes / 2; step; step /= 2) {
      const Greatest other{__shfl_down_sync(~0u, found.number, step), __shfl_down_sync(~0u, found.edge, step),
                           __shfl_down_sync(~0u, found.at, step)};
      if (found < other) found = other;
    }
    return {__shfl_sync(~0u, found.number, 0), __shfl_sync(~0u, found.edge, 0), __shfl_sync(~0u, found.at, 0)};
  }

  // Of a node's in-edges, more than `count`, those with the least number(e), of which the first go first. A warp goes
  // over all once; few of these are less than the greatest that it holds. Returns the least number of the others. An
  // edge with the number `none` is taken only where there are too few others.
  template <class Number>
  __device__ u64 keep(u64 degree, u32 lane, const Number& number) const {
    for (u32 e = lane; e < count; e += warp_lanes) {
      numbers[e] = number(e);
      edges[e] = static_cast<i64>(e);
    }
    __syncwarp();
    Greatest held = greatest(lane);
    u64 left = none;  // the least that this lane knows of
    for (u64 first = count; first < degree; first += warp_lanes) {
      u64 mine = first + lane < degree ? number(first + lane) : none;
      u32 lesser = __ballot_sync(~0u, mine < held.number);
      while (lesser) {  // an edge with the same number stays behind those before it
        const u32 from = static_cast<u32>(__ffs(static_cast<int>(lesser))) - 1;
        const u64 taken = __shfl_sync(~0u, mine, static_cast<int>(from));
        if (held.number < left) left = held.number;
        if (lane == from) mine = none;
        if (lane == 0) {
          numbers[held.at] = taken;
          edges[held.at] = static_cast<i64>(first + from);
        }
        __syncwarp();
        held = greatest(lane);
        lesser = lesser & (lesser - 1) & __ballot_sync(~0u, mine < held.number);
      }
      if (mine < left) left = mine;
    }
    for (int step = warp_lanes / 2; step; step /= 2) {
      const u64 other = __shfl_xor_sync(~0u, left, step);
      if (other < left) left = other;
    }
    return left;
  }

  // At the end, the edges in the graph's order replace their numbers.
  __device__ void put_in_order(u32 lane) const {
    for (u32 i = lane; i < count; i += warp_lanes) {
      u32 rank = 0;
      for (u32 other = 0; other < count; ++other) rank += edges[other] < edges[i];
      numbers[rank] = static_cast<u64>(edges[i]);
    }
    __syncwarp();
  }
};

}  // namespace gids::sampled_edges

#endif
