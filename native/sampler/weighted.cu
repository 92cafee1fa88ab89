// Neighbor sampling in proportion to weights, by GPU threads that read topology and weights in pinned host memory, by
// zero-copy. Launched between the kernels of neighbor.cu by gids.sampler.device.sampling; a warp takes one node.
// Chooses the same edges with the same weights as native/sampler/neighbor.cpp on the host. Grids may have any size;
// blocks are multiples of 32 threads.
#include "gids/neighbor.h"
#include "gids/random.h"
#include "gids/sampled_edges.h"
#include "gids/variates.h"
#include "gids/weighted.h"

namespace neighbor = gids::neighbor;
namespace variates = gids::variates;
namespace weighted = gids::weighted;
using namespace gids::sampled_edges;
using gids::i64;
using gids::u32;
using gids::u64;
using gids::u8;
using gids::variates::Variates;

namespace {

// The rate of each edge. weights: of all edges of the relation; null: all 1. near: a bit for each source, on the
// device; null: none is near.
struct Rates {
  const float* weights;
  const u8* near;
  float factor;

  __device__ float of(const Edges& edges, u64 position) const {
    const float weight = weights ? weights[position] : 1;
    return near ? weighted::favoured(weight, weighted::is_near(near, edges.source(position)), factor) : weight;
  }
};

// The running sum of 32 weights, one after the other as on the host; every lane keeps it up to its own weight.
__device__ double add_up(double sum, float weight, u32 lane, double& up_to_mine) {
  for (u32 i = 0; i < warp_lanes; ++i) {
    sum = variates::plus(sum, static_cast<double>(__shfl_sync(~0u, weight, static_cast<int>(i))));
    if (i == lane) up_to_mine = sum;
  }
  return sum;
}

}  // namespace

// Counts the in-edges sampled of each node if weights can be 0; edges of weight 0 are never sampled. Reads only as
// many weights as needed.
extern "C" __global__ void gids_count_weighted(u64 n, const i64* begins, const u64* degrees, const float* weights,
                                               int fanout, u32 replace, i64* counts) {
  const u32 lane = threadIdx.x % warp_lanes;
  const u64 enough = fanout == neighbor::all_neighbors ? none : replace ? 1 : static_cast<u64>(fanout);
  for (u64 v = thread_index() / warp_lanes; v < n; v += thread_count() / warp_lanes) {
    const u64 degree = degrees[v], begin = static_cast<u64>(begins[v]);
    u64 possible = 0;
    for (u64 first = 0; first < degree && possible < enough; first += warp_lanes) {
      const bool here = first + lane < degree && weights[begin + first + lane] > 0;
      possible += static_cast<u64>(__popc(__ballot_sync(~0u, here)));
    }
    if (lane == 0)
      counts[v] = static_cast<i64>(replace ? neighbor::replaced_count(possible, fanout)
                                           : neighbor::sampled_count(possible, fanout));
  }
}

// Without replacement: those with the least waiting times, in the graph's order; all that can be drawn of a node that
// has no more of them than the fanout, or with a fanout of `none`. numbers: u64 for each place, of the fanouts that
// are less. estimates: how often the edge at a place counts.
extern "C" __global__ __launch_bounds__(256, 4) void gids_draw_weighted(  // 4 x 256 threads of 64 registers
    const i64* nodes, u64 n, const i64* begins, const u64* degrees, const i64* offsets, u64 now, u64 next, double cos,
    double sin, u64 fanout, const float* weights, const u8* near, float factor, u64* numbers, float* estimates,
    const void* indices, u32 wide, u64 num_src, u64 known, u64 base, u64* slots, u32 log2_slots, u32* sources,
    i64* positions, u32* slot_of, const u32* tags, u64* fault) {
  const Edges edges{indices, wide, log2_slots, num_src, known, slots, sources, positions, slot_of, tags, fault};
  const Rates rates{weights, near, factor};
  const u32 lane = threadIdx.x % warp_lanes;
  for (u64 v = thread_index() / warp_lanes; v < n; v += thread_count() / warp_lanes) {
    const u64 degree = degrees[v], begin = static_cast<u64>(begins[v]);
    const u64 count = static_cast<u64>(offsets[v + 1] - offsets[v]);
    u64 place = base + static_cast<u64>(offsets[v]);
    if (degree <= fanout || count < fanout) {
      for (u64 first = 0; first < degree; first += warp_lanes) {
        const u64 position = begin + first + lane;
        const bool taken = first + lane < degree && (!weights || weights[position] > 0);
        const u32 all_taken = __ballot_sync(~0u, taken);
        if (taken) {
          const u64 at = place + static_cast<u64>(__popc(all_taken & ((1u << lane) - 1)));
          estimates[at] = 1;
          edges.take(at, position, nodes[v]);
        }
        place += static_cast<u64>(__popc(all_taken));
      }
      continue;
    }
    const Variates of_edges = Variates{now, next, cos, sin}.of_edges(edges.drawn_as(nodes[v]));
    const Least least{numbers + place, positions + place, static_cast<u32>(fanout)};
    const u64 next_time = least.keep(degree, lane, [&](u64 e) {  // times are ordered as their bits are
      const float weight = rates.of(edges, begin + e);
      return weight > 0 ? variates::bits_of(weighted::waiting_time(of_edges.of_node(e), weight)) : none;
    });
    least.put_in_order(lane);
    for (u32 i = lane; i < fanout; i += warp_lanes) {
      const u64 position = begin + least.numbers[i];
      estimates[place + i] =
          next_time == none ? 1 : weighted::estimate(rates.of(edges, position), variates::from_bits(next_time));
      edges.take(place + i, position, nodes[v]);
    }
    __syncwarp();
  }
}

// With replacement, by the inverse of the running sum; all that can be drawn with a fanout of -1 are taken by the
// kernel above. Reads all weights twice: their sum says where the draws lie. numbers: u64 for each place.
extern "C" __global__ __launch_bounds__(256, 3) void gids_draw_weighted_replaced(  // of 80 registers; 64 would spill
    const i64* nodes, u64 n, const i64* begins, const u64* degrees, const i64* offsets, u64 now, u64 next, double cos,
    double sin, u64 fanout, const float* weights, const u8* near, float factor, u64* numbers, float* estimates,
    const void* indices, u32 wide, u64 num_src, u64 known, u64 base, u64* slots, u32 log2_slots, u32* sources,
    i64* positions, u32* slot_of, const u32* tags, u64* fault) {
  const Edges edges{indices, wide, log2_slots, num_src, known, slots, sources, positions, slot_of, tags, fault};
  const Rates rates{weights, near, factor};
  const Variates variates{now, next, cos, sin};
  const u32 lane = threadIdx.x % warp_lanes;
  for (u64 v = thread_index() / warp_lanes; v < n; v += thread_count() / warp_lanes) {
    const u64 degree = degrees[v], begin = static_cast<u64>(begins[v]);
    const u64 place = base + static_cast<u64>(offsets[v]);
    if (offsets[v + 1] == offsets[v]) continue;
    const auto rate = [&](u64 e) { return e < degree ? rates.of(edges, begin + e) : 0.0f; };
    double sum = 0, up_to_mine = 0;
    u64 last = 0;  // the last edge that can be drawn
    for (u64 first = 0; first < degree; first += warp_lanes) {
      const float weight = rate(first + lane);
      sum = add_up(sum, weight, lane, up_to_mine);
      const u32 possible = __ballot_sync(~0u, weight > 0);
      if (possible) last = first + 31 - static_cast<u64>(__clz(static_cast<int>(possible)));
    }
    for (u64 i = lane; i < fanout; i += warp_lanes) {
      const double unit = variates::unit(variates.draw(edges.drawn_as(nodes[v]), static_cast<u32>(i)));
      numbers[place + i] = variates::bits_of(variates::times(unit, sum));
      positions[place + i] = static_cast<i64>(last);  // of a number that rounding put at the sum
    }
    double before = 0;
    for (u64 first = 0; first < degree; first += warp_lanes) {
      const double after = add_up(before, rate(first + lane), lane, up_to_mine);
      for (u64 chunk = 0; chunk < fanout; chunk += warp_lanes) {
        const u64 i = chunk + lane;
        const double drawn = i < fanout ? variates::from_bits(numbers[place + i]) : after;
        u32 found = __ballot_sync(~0u, before <= drawn && drawn < after);
        for (; found; found &= found - 1) {
          const u32 from = static_cast<u32>(__ffs(static_cast<int>(found))) - 1;
          const double of_lane = __shfl_sync(~0u, drawn, static_cast<int>(from));
          const u32 beyond = __ballot_sync(~0u, up_to_mine > of_lane);
          if (lane == from) positions[place + i] = static_cast<i64>(first) + __ffs(static_cast<int>(beyond)) - 1;
        }
      }
      before = after;
    }
    for (u64 i = lane; i < fanout; i += warp_lanes) {
      const u64 position = begin + static_cast<u64>(positions[place + i]);
      estimates[place + i] = weighted::replaced_estimate(rates.of(edges, position), sum, fanout);
      edges.take(place + i, position, nodes[v]);
    }
    __syncwarp();
  }
}
