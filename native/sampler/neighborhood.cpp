#include "sampler/neighborhood.h"

namespace gids::sampler {

namespace {

constexpr size_t node_piece = 64;  // destinations that one thread takes at a time: degrees differ much

}  // namespace

void Neighborhood::read(cache::Workers& workers, const Frontier& frontier) {
  const size_t n = frontier.size();
  u64* offsets = offsets_.ensure(n + 1);
  offsets[0] = 0;
  for (size_t v = 0; v < n; ++v) offsets[v + 1] = offsets[v] + frontier.degrees[v];
  i64* local = local_.ensure(offsets[n]);
  workers.parallel_for(n, node_piece, [&](size_t first, size_t last, u32) {
    for (size_t v = first; v < last; ++v)
      for (u64 e = 0; e < frontier.degrees[v]; ++e)
        local[offsets[v] + e] = static_cast<i64>(frontier.source(static_cast<u64>(frontier.begins[v]) + e));
  });
  set_.start({});
  set_.relabel(local, offsets[n], workers);
}

}  // namespace gids::sampler
