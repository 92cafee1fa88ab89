#include "sampler/draws.h"

namespace gids::sampler {

namespace {

constexpr u32 at_once = 8;
static_assert(draw_lanes % at_once == 0);

inline __attribute__((always_inline)) void draw_pairs_here(const u64* node, u64 key, u32 i, DrawPairs& out) {
  for (u32 lane = 0; lane < draw_lanes; ++lane) {
    const random::Words pair = random::draw_pair(key, node[lane], i);
    out[0][lane] = random::low_half(pair);
    out[1][lane] = random::high_half(pair);
  }
}

inline __attribute__((always_inline)) void draw_first_here(const u64* node, u32 count, u64 key, u64* out) {
  for (u32 group = 0; group < count; group += at_once)
    for (u32 lane = group; lane < group + at_once; ++lane)
      out[lane] = random::low_half(random::draw_pair(key, node[lane], 0));
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void draw_pairs_avx2(const u64* node, u64 key, u32 i, DrawPairs& out) {
  draw_pairs_here(node, key, i, out);
}
__attribute__((target("avx2"))) void draw_first_avx2(const u64* node, u32 count, u64 key, u64* out) {
  draw_first_here(node, count, key, out);
}
const bool has_avx2 = __builtin_cpu_supports("avx2");
#endif

}  // namespace

void draw_pairs(const u64 (&node)[draw_lanes], u64 key, u32 i, DrawPairs& out) {
#if defined(__x86_64__)
  if (has_avx2) return draw_pairs_avx2(node, key, i, out);
#endif
  draw_pairs_here(node, key, i, out);
}

void draw_first(const u64 (&node)[draw_lanes], u32 count, u64 key, u64 (&out)[draw_lanes]) {
#if defined(__x86_64__)
  if (has_avx2) return draw_first_avx2(node, count, key, out);
#endif
  draw_first_here(node, count, key, out);
}

}  // namespace gids::sampler
