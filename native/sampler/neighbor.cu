// Uniform neighbor sampling by GPU threads that read the topology in pinned host memory, by zero-copy, or on the
// device. Compiled at run time; launched by gids.sampler.device.sampling, which says in which order.
// Chooses and numbers exactly as native/sampler/neighbor.cpp does on the host. Grids may have any size; blocks are
// multiples of 32 threads.
//
// gids/sampled_edges.h defines places. An edge whose own place is in the id map leads to a new node.
#include "gids/id_map.h"
#include "gids/labor.h"
#include "gids/neighbor.h"
#include "gids/pair_map.h"
#include "gids/random.h"
#include "gids/sampled_edges.h"
#include "gids/variates.h"

namespace id_map = gids::id_map;
namespace neighbor = gids::neighbor;
namespace pair_map = gids::pair_map;
using namespace gids::sampled_edges;
using gids::i64;
using gids::u32;
using gids::u64;
using gids::variates::Variates;

namespace {

// The least position that the map has noted in a slot.
__device__ u64 at_of(const u64* slots, u32 slot, u32 in_trees) {
  return in_trees ? slots[pair_map::slot_words * u64{slot} + 1] : id_map::at_of(slots[slot]);
}

// int64 values if wide, else int32.
__device__ i64 read(const void* values, u32 wide, u64 i) {
  return wide ? static_cast<const i64*>(values)[i] : static_cast<const int*>(values)[i];
}
__device__ void write(void* values, u32 wide, u64 i, i64 value) {
  if (wide) static_cast<i64*>(values)[i] = value;
  else static_cast<int*>(values)[i] = static_cast<int>(value);
}

// The sum up to and including the thread's own value, and the sum of the block. All threads call.
__device__ i64 scan_block(i64 value, i64& sum) {
  __shared__ i64 of_warps[warp_lanes];
  const u32 lane = threadIdx.x % warp_lanes, warp = threadIdx.x / warp_lanes;
  for (u32 step = 1; step < warp_lanes; step *= 2) {
    const i64 before = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += before;
  }
  if (lane == warp_lanes - 1) of_warps[warp] = value;
  __syncthreads();
  sum = 0;
  for (u32 w = 0; w < blockDim.x / warp_lanes; ++w) {
    if (w == warp) value += sum;
    sum += of_warps[w];
  }
  __syncthreads();  // before the next call writes
  return value;
}

// The values of this block: one part of each array, of whole blocks of threads.
__device__ u64 part_size(u64 n) { return gids::align_up(gids::div_ceil(n, gridDim.x), blockDim.x); }

}  // namespace

// fault: the first position of a seed that is no node. count: gets n.
extern "C" __global__ void gids_check_seeds(const i64* seeds, u64 n, u64 node_count, u64* fault, u64* count) {
  if (thread_index() == 0) *count = n;
  for (u64 i = thread_index(); i < n; i += thread_count())
    if (static_cast<u64>(seeds[i]) >= node_count) note_fault(fault, i);
}

// Notes node i of a type at i, in an empty table. in_trees: nodes are keys of pair_map.h.
extern "C" __global__ void gids_note_nodes(const i64* nodes, u64 n, u64* slots, u32 log2_slots, u32 in_trees) {
  for (u64 i = thread_index(); i < n; i += thread_count()) {
    const u64 id = static_cast<u64>(nodes[i]);  // those out of range were found to be no seeds
    if (in_trees) {
      if (pair_map::id_of(id) < id_map::max_ids) pair_map::note(slots, log2_slots, id, i);
    } else if (id < id_map::max_ids) {
      id_map::note(slots, log2_slots, id, i);
    }
  }
}

// Where each node's in-edges begin, how many there are, and how many of them are sampled. Two lanes read the two
// ends of a node's range in one access, which mostly is one sector. fault: the least node with a bad range.
extern "C" __global__ void gids_count_neighbors(const i64* nodes, u64 n, u64 num_dst, const i64* indptr, u64 num_edges,
                                                int fanout, u32 replace, u32 in_trees, i64* begins, u64* degrees,
                                                i64* counts, u64* fault) {
  const u64 end = gids::align_up(2 * n, warp_lanes);  // whole warps: all lanes meet in the shuffle
  for (u64 i = thread_index(); i < end; i += thread_count()) {
    const u64 v = i / 2;
    const u64 given = v < n ? static_cast<u64>(nodes[v]) : none;
    const u64 node = in_trees ? pair_map::id_of(given) : given;
    const i64 here = node < num_dst ? indptr[node + i % 2] : 0;
    const i64 next = __shfl_down_sync(~0u, here, 1);
    if (i % 2 || v >= n) continue;
    const bool bad = here < 0 || next < here || static_cast<u64>(next) > num_edges;
    if (bad) note_fault(fault, node);
    const u64 degree = bad ? 0 : static_cast<u64>(next - here);
    begins[v] = here;
    degrees[v] = degree;
    counts[v] =
        static_cast<i64>(replace ? neighbor::replaced_count(degree, fanout) : neighbor::sampled_count(degree, fanout));
  }
}

// Leaves out the in-edges that are later than the node's tree; those of a node are in the order of their times. times:
// of the edges, or of their sources; a source out of range is left to the kernels that take it. most: of the others,
// only so many, the last ones. counts: how many are sampled of those left.
extern "C" __global__ void gids_leave_out_later(const i64* nodes, u64 n, i64* begins, u64* degrees, const void* times,
                                                u32 wide_times, u32 of_sources, const void* indices, u32 wide,
                                                u64 num_src, const i64* of_trees, u64 most, int fanout, u32 replace,
                                                i64* counts) {
  for (u64 v = thread_index(); v < n; v += thread_count()) {
    if (degrees[v] == 0) continue;  // also of padding, which is in no tree
    const i64 latest = of_trees[pair_map::tree_of(static_cast<u64>(nodes[v]))];
    const u64 begin = static_cast<u64>(begins[v]);
    u64 low = 0, high = degrees[v];
    while (low < high) {
      const u64 middle = (low + high) / 2;
      u64 at = begin + middle;
      if (of_sources) at = read_source(indices, wide, at);
      if (of_sources && at >= num_src) at = 0;
      if (static_cast<i64>(read_source(times, wide_times, at)) <= latest) low = middle + 1;
      else high = middle;
    }
    const u64 kept = low < most ? low : most;
    begins[v] = static_cast<i64>(begin + low - kept);
    degrees[v] = kept;
    counts[v] =
        static_cast<i64>(replace ? neighbor::replaced_count(kept, fanout) : neighbor::sampled_count(kept, fanout));
  }
}

// Samples for each node; a group of `width` lanes (a power of two) takes one node, a lane one draw, so that a
// node's neighbors are read by one access. offsets: int64[n + 1], where each node's edges begin among the
// relation's. fault: the least position with a bad source.
extern "C" __global__ void gids_draw_neighbors(const i64* nodes, u64 n, const i64* begins, const u64* degrees,
                                               const i64* offsets, u64 layer_key, u32 fanout, u32 width,
                                               const void* indices, u32 wide, u64 num_src, u64 known, u64 base,
                                               u64* slots, u32 log2_slots, u32* sources, i64* positions, u32* slot_of,
                                               const u32* tags, u64* fault) {
  const Edges edges{indices, wide, log2_slots, num_src, known, slots, sources, positions, slot_of, tags, fault};
  const u32 lane = threadIdx.x % width;
  const u64 at_once = warp_lanes / width;
  const u64 stride = thread_count() / warp_lanes * at_once;
  for (u64 first = thread_index() / warp_lanes * at_once; first < n; first += stride) {
    const u64 v = first + threadIdx.x % warp_lanes / width;
    const bool there = v < n;
    const u64 degree = there ? degrees[v] : 0;
    const u64 begin = there ? static_cast<u64>(begins[v]) : 0;
    const i64 node = there ? nodes[v] : 0;
    const u64 place = base + (there ? static_cast<u64>(offsets[v]) : 0);
    const u64 count = neighbor::sampled_count(degree, static_cast<int>(fanout));
    for (u32 chunk = 0; chunk < fanout; chunk += width) {
      const u32 i = chunk + lane;
      const bool drawing = degree > fanout && i < fanout;
      u64 offset = i;
      if (drawing) {
        offset = neighbor::candidate(gids::random::draw(layer_key, edges.drawn_as(node), i), degree, fanout, i);
        for (u32 earlier = 0; earlier < chunk; ++earlier)
          if (static_cast<u64>(positions[place + earlier]) == begin + offset) {
            offset = neighbor::last_candidate(degree, fanout, i);
            break;
          }
      }
      const u32 lanes = fanout - chunk < width ? fanout - chunk : width;
      for (u32 earlier = 0; earlier < lanes; ++earlier) {  // by then that lane's own draw is settled
        const u64 drawn = __shfl_sync(~0u, offset, static_cast<int>(earlier), static_cast<int>(width));
        if (drawing && earlier < lane && drawn == offset) offset = neighbor::last_candidate(degree, fanout, i);
      }
      if (i < count) edges.take(place + i, begin + offset, node);
      __syncwarp();  // later chunks look at these positions
    }
  }
}

// With replacement; a thread per draw.
extern "C" __global__ void gids_draw_replaced(const i64* nodes, u64 n, const i64* begins, const u64* degrees,
                                              const i64* offsets, u64 now, u64 next, double cos, double sin, u32 fanout,
                                              const void* indices, u32 wide, u64 num_src, u64 known, u64 base,
                                              u64* slots, u32 log2_slots, u32* sources, i64* positions, u32* slot_of,
                                              const u32* tags, u64* fault) {
  const Edges edges{indices, wide, log2_slots, num_src, known, slots, sources, positions, slot_of, tags, fault};
  const Variates variates{now, next, cos, sin};
  for (u64 t = thread_index(); t < n * fanout; t += thread_count()) {
    const u64 v = t / fanout, degree = degrees[v];
    const u32 i = static_cast<u32>(t % fanout);
    if (degree == 0) continue;
    const u64 offset = gids::random::below(variates.draw(edges.drawn_as(nodes[v]), i), degree);
    edges.take(base + static_cast<u64>(offsets[v]) + i, static_cast<u64>(begins[v]) + offset, nodes[v]);
  }
}

// The in-edges with the least numbers, their own or (by_source) those of their sources, in the graph's order; all of
// a node that has no more than the fanout. A warp takes one node, and goes over its in-edges once; few of these are
// less than the greatest that it holds. numbers: u64 for each place.
extern "C" __global__ void gids_draw_least(const i64* nodes, u64 n, const i64* begins, const u64* degrees,
                                           const i64* offsets, u64 now, u64 next, double cos, double sin, u32 fanout,
                                           u32 by_source, u64* numbers, const void* indices, u32 wide, u64 num_src,
                                           u64 known, u64 base, u64* slots, u32 log2_slots, u32* sources,
                                           i64* positions, u32* slot_of, const u32* tags, u64* fault) {
  const Edges edges{indices, wide, log2_slots, num_src, known, slots, sources, positions, slot_of, tags, fault};
  const u32 lane = threadIdx.x % warp_lanes;
  for (u64 v = thread_index() / warp_lanes; v < n; v += thread_count() / warp_lanes) {
    const u64 degree = degrees[v], begin = static_cast<u64>(begins[v]);
    const u64 place = base + static_cast<u64>(offsets[v]);
    if (degree <= fanout) {
      for (u64 e = lane; e < degree; e += warp_lanes) edges.take(place + e, begin + e, nodes[v]);
      continue;
    }
    Variates variates{now, next, cos, sin};
    if (!by_source) variates = variates.of_edges(edges.drawn_as(nodes[v]));
    const auto number = [&](u64 e) {
      u64 of = e;
      if (by_source) {
        of = read_source(indices, wide, begin + e);
        if (of >= num_src) note_fault(fault, begin + e);
      }
      return gids::variates::bits_of(gids::variates::unit(variates.of_node(of)));  // ordered as the numbers are
    };
    const Least least{numbers + place, positions + place, fanout};
    least.keep(degree, lane, number);
    least.put_in_order(lane);
    for (u32 i = lane; i < fanout; i += warp_lanes) edges.take(place + i, begin + least.numbers[i], nodes[v]);
    __syncwarp();
  }
}

// Counts the in-edges that LABOR-0 takes of each node with more than the fanout; a warp takes one node. A source out of
// range is detected when its edge is taken.
extern "C" __global__ void gids_count_labor(u64 n, const i64* begins, const u64* degrees, u64 now, u64 next, double cos,
                                            double sin, u32 fanout, const void* indices, u32 wide, u64 num_src,
                                            i64* counts, u64* fault) {
  const Variates variates{now, next, cos, sin};
  const u32 lane = threadIdx.x % warp_lanes;
  for (u64 v = thread_index() / warp_lanes; v < n; v += thread_count() / warp_lanes) {
    const u64 degree = degrees[v], begin = static_cast<u64>(begins[v]);
    if (degree <= fanout) continue;
    i64 count = 0;
    for (u64 first = 0; first < degree; first += warp_lanes) {
      bool taken = false;
      if (first + lane < degree) {
        const u64 source = read_source(indices, wide, begin + first + lane);
        if (source >= num_src) note_fault(fault, begin + first + lane);
        taken = gids::labor::is_taken(variates.of_node(source), degree, fanout);
      }
      count += __popc(__ballot_sync(~0u, taken));
    }
    if (lane == 0) counts[v] = count;
  }
}

// Takes these in-edges, and all of a node that has no more, in the graph's order.
extern "C" __global__ void gids_draw_labor(u64 n, const i64* begins, const u64* degrees, const i64* offsets, u64 now,
                                           u64 next, double cos, double sin, u32 fanout, const void* indices, u32 wide,
                                           u64 num_src, u64 known, u64 base, u64* slots, u32 log2_slots, u32* sources,
                                           i64* positions, u32* slot_of, const u32* tags, u64* fault) {
  const Variates variates{now, next, cos, sin};
  const Edges edges{indices, wide, log2_slots, num_src, known, slots, sources, positions, slot_of, tags, fault};
  const u32 lane = threadIdx.x % warp_lanes;
  for (u64 v = thread_index() / warp_lanes; v < n; v += thread_count() / warp_lanes) {
    const u64 degree = degrees[v], begin = static_cast<u64>(begins[v]);
    u64 place = base + static_cast<u64>(offsets[v]);
    for (u64 first = 0; first < degree; first += warp_lanes) {
      const u64 position = begin + first + lane;
      bool taken = false;
      if (first + lane < degree)
        taken = degree <= fanout ||
                gids::labor::is_taken(variates.of_node(read_source(indices, wide, position)), degree, fanout);
      const u32 all_taken = __ballot_sync(~0u, taken);
      if (taken) edges.take(place + static_cast<u64>(__popc(all_taken & ((1u << lane) - 1))), position, 0);
      place += static_cast<u64>(__popc(all_taken));
    }
  }
}

// Takes all neighbors of each node; a thread per edge, so that nodes with many neighbors do not delay others.
// edge_count = offsets[n].
extern "C" __global__ void gids_take_neighbors(const i64* nodes, u64 n, const i64* begins, const i64* offsets,
                                               u64 edge_count, const void* indices, u32 wide, u64 num_src, u64 known,
                                               u64 base, u64* slots, u32 log2_slots, u32* sources, i64* positions,
                                               u32* slot_of, const u32* tags, u64* fault) {
  const Edges edges{indices, wide, log2_slots, num_src, known, slots, sources, positions, slot_of, tags, fault};
  for (u64 e = thread_index(); e < edge_count; e += thread_count()) {
    u64 low = 0, high = n;  // the last v with offsets[v] <= e
    while (high - low > 1) {
      const u64 middle = (low + high) / 2;
      (static_cast<u64>(offsets[middle]) <= e ? low : high) = middle;
    }
    edges.take(base + e, static_cast<u64>(begins[low]) + (e - static_cast<u64>(offsets[low])), nodes[low]);
  }
}

// first[base + e] = 1 if edge e is the first one that leads to a new node, else 0; and 0 from *edge_count on.
extern "C" __global__ void gids_mark_first(const u64* slots, const u32* slot_of, const i64* edge_count, u64 capacity,
                                           u64 known, u64 base, u32 in_trees, int* first) {
  const u64 edges = static_cast<u64>(*edge_count);
  for (u64 e = thread_index(); e < capacity; e += thread_count()) {
    const u64 place = base + e;
    first[place] = e < edges && at_of(slots, slot_of[place], in_trees) == known + place;
  }
}

// ranks: the running sum of first. Writes local ids and positions of a relation's edges, and the new nodes behind
// the *node_count ones before; known is at least that, and places begin there.
extern "C" __global__ void gids_relabel(const i64* edge_count, u64 known, u64 base, const u64* slots,
                                        const u32* slot_of, const int* ranks, const i64* node_count, u32 in_trees,
                                        const u32* sources, const i64* from_positions, i64* indices, i64* positions,
                                        i64* nodes) {
  const u64 edges = static_cast<u64>(*edge_count), first = static_cast<u64>(*node_count);
  for (u64 e = thread_index(); e < edges; e += thread_count()) {
    const u64 place = base + e;
    const u64 at = at_of(slots, slot_of[place], in_trees);
    const u64 local = at < known ? at : first + static_cast<u64>(ranks[at - known]) - 1;
    if (at == known + place)
      nodes[local] = in_trees ? static_cast<i64>(slots[pair_map::slot_words * u64{slot_of[place]}]) : sources[place];
    indices[e] = static_cast<i64>(local);
    positions[e] = from_positions[place];
  }
}

// The sum of each block's part of values[skip, skip + n).
extern "C" __global__ void gids_sum_parts(const void* values, u32 wide, u64 skip, u64 n, i64* sums) {
  const u64 part = part_size(n), begin = blockIdx.x * part, end = begin + part < n ? begin + part : n;
  i64 mine = 0, sum;
  for (u64 i = begin + threadIdx.x; i < end; i += blockDim.x) mine += read(values, wide, skip + i);
  scan_block(mine, sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// Replaces values[skip, skip + n) by their running sums; those before become 0. sums: of gids_sum_parts in the same
// grid; one block needs none. total: gets the sum of all, added to *base unless that is null.
extern "C" __global__ void gids_scan_parts(void* values, u32 wide, u64 skip, u64 n, const i64* sums, const i64* base,
                                           i64* total) {
  const u64 part = part_size(n), begin = blockIdx.x * part, end = begin + part < n ? begin + part : n;
  i64 mine = 0, before;
  for (u32 block = threadIdx.x; block < blockIdx.x; block += blockDim.x) mine += sums[block];
  scan_block(mine, before);
  for (u64 first = begin; first < end; first += blockDim.x) {
    const u64 i = first + threadIdx.x;
    i64 sum;
    const i64 through = before + scan_block(i < end ? read(values, wide, skip + i) : 0, sum);
    if (i < end) write(values, wide, skip + i, through);
    before += sum;
  }
  if (threadIdx.x) return;
  if (blockIdx.x == 0)
    for (u64 i = 0; i < skip; ++i) write(values, wide, i, 0);
  if (blockIdx.x + 1 == gridDim.x) *total = before + (base ? *base : 0);
}

// The weight of each edge where a source has one number for all its edges; 1 with a fanout of -1. A warp takes a
// destination.
extern "C" __global__ void gids_weigh_edges(u64 n, const u64* degrees, const i64* indptr, int fanout, float* weights) {
  const u32 lane = threadIdx.x % warp_lanes;
  for (u64 v = thread_index() / warp_lanes; v < n; v += thread_count() / warp_lanes) {
    const double weight = static_cast<double>(degrees[v]) / fanout;
    for (i64 e = indptr[v] + lane; e < indptr[v + 1]; e += warp_lanes)
      weights[e] = weight > 1 ? static_cast<float>(weight) : 1.0f;
  }
}
