// Neighbors drawn in proportion to weights: those with the least waiting times are taken (Efraimidis and Spirakis,
// 2006). And the weight of a taken edge in a sum over all. Shared by the host and the CUDA kernels, which must
// agree on every bit: as in variates.h no number here comes from a mathematical library.
#pragma once

#include "gids/target.h"
#include "gids/variates.h"

namespace gids::weighted {

// The waiting time of an edge whose rate is its weight, above 0: -ln(u) / weight. Never below +0, so that times
// are ordered as their bits are.
GIDS_HD double waiting_time(u64 bits, float weight) {
  return variates::over(variates::plus(0, -variates::log(variates::unit(bits))), static_cast<double>(weight));
}

// 1 - e^-x, x >= 0, to the last bits where x is small too.
GIDS_HD double one_minus_exp(double x) {
  constexpr double series[14] = {1.0,
                                 -1.0 / 2,
                                 1.0 / 6,
                                 -1.0 / 24,
                                 1.0 / 120,
                                 -1.0 / 720,
                                 1.0 / 5040,
                                 -1.0 / 40320,
                                 1.0 / 362880,
                                 -1.0 / 3628800,
                                 1.0 / 39916800,
                                 -1.0 / 479001600,
                                 1.0 / 6227020800,
                                 -1.0 / 87178291200};
  if (x < 0.5) return variates::times(x, variates::polynomial(series, x));
  return x < 50 ? variates::plus(1, -variates::exp(-x)) : 1;
}

// 1 / the probability that an edge is taken: that it comes before the first edge that is not (Cohen and Kaplan, 2007).
GIDS_HD float estimate(float weight, double next_time) {
  return static_cast<float>(variates::over(1, one_minus_exp(variates::times(static_cast<double>(weight), next_time))));
}

// The same for one of k draws with replacement, from edges whose weights have this sum (Hansen and Hurwitz, 1943).
GIDS_HD float replaced_estimate(float weight, double sum, u64 k) {
  return static_cast<float>(variates::over(sum, variates::times(static_cast<double>(k), static_cast<double>(weight))));
}

// near: a bit for each source, the lowest of a byte first.
GIDS_HD bool is_near(const u8* near, u64 source) { return near[source / 8] >> (source % 8) & 1; }

// The weight of an edge whose source is near, or is not.
GIDS_HD float favoured(float weight, bool near, float factor) { return weight * (near ? factor : 1.0f); }

}  // namespace gids::weighted
