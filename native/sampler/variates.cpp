#include "sampler/variates.h"

#include <array>
#include <cmath>
#include <limits>
#include <numbers>

namespace gids::sampler {

namespace {

constexpr u64 all_ones = ~u64{0};
constexpr u32 table_bits = 10;
constexpr double slack = 1e-9;  // far above the rounding of a quantile, far below what costs anything

double ratio(const double (&a)[8], const double (&b)[8], double x) {
  double above = a[7], below = b[7];
  for (int i = 6; i >= 0; --i) {
    above = above * x + a[i];
    below = below * x + b[i];
  }
  return above / below;
}

// At most the normal variate of the numbers whose leading bits are an entry's index.
using Table = std::array<double, size_t{1} << table_bits>;
const Table least_quantile = [] {
  Table table;
  table[0] = -std::numeric_limits<double>::max();
  for (size_t i = 1; i < table.size(); ++i)
    table[i] = normal_quantile(static_cast<double>(i) / static_cast<double>(table.size()));
  return table;
}();

}  // namespace

Moment moment_of(u64 seed, u64 epoch, u64 step, u64 kappa) {
  const u64 group = kappa == endless ? 0 : step / kappa;
  const double c = kappa == endless ? 0 : static_cast<double>(step % kappa) / static_cast<double>(kappa);
  return {random::minibatch_key(seed, epoch, group), random::minibatch_key(seed, epoch, group + 1), c};
}

double normal_cdf(double x) { return 0.5 * std::erfc(-x * (std::numbers::sqrt2 / 2)); }

double normal_quantile(double p) {
  static constexpr double a[8] = {3.3871328727963666080e0, 1.3314166789178437745e+2, 1.9715909503065514427e+3,
                                  1.3731693765509461125e+4, 4.5921953931549871457e+4, 6.7265770927008700853e+4,
                                  3.3430575583588128105e+4, 2.5090809287301226727e+3};
  static constexpr double b[8] = {1.0, 4.2313330701600911252e+1, 6.8718700749205790830e+2,
                                  5.3941960214247511077e+3, 2.1213794301586595867e+4, 3.9307895800092710610e+4,
                                  2.8729085735721942674e+4, 5.2264952788528545610e+3};
  static constexpr double c[8] = {1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0,
                                  3.64784832476320460504e0, 1.27045825245236838258e0, 2.41780725177450611770e-1,
                                  2.27238449892691845833e-2, 7.74545014278341407640e-4};
  static constexpr double d[8] = {1.0, 2.05319162663775882187e0, 1.67638483018380384940e0,
                                  6.89767334985100004550e-1, 1.48103976427480074590e-1, 1.51986665636164571966e-2,
                                  5.47593808499534494600e-4, 1.05075007164441684324e-9};
  static constexpr double e[8] = {6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0,
                                  2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
                                  2.71155556874348757815e-5, 2.01033439929228813265e-7};
  static constexpr double f[8] = {1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1,
                                  1.48753612908506148525e-2, 7.86869131145613259100e-4, 1.84631831751005468180e-5,
                                  1.42151175831644588870e-7, 2.04426310338993978564e-15};
  const double q = p - 0.5;
  if (std::abs(q) <= 0.425) return q * ratio(a, b, 0.180625 - q * q);
  const double r = std::sqrt(-std::log(q < 0 ? p : 1 - p));
  const double x = r <= 5 ? ratio(c, d, r - 1.6) : ratio(e, f, r - 5);
  return q < 0 ? -x : x;
}

Variates::Variates(const Moment& moment, u32 layer, u32 number)
    : now_(random::layer_key(moment.now, layer, number)),
      next_(random::layer_key(moment.next, layer, number)),
      smooth_(moment.c > 0),
      cos_(std::cos(moment.c * (std::numbers::pi / 2))),
      sin_(std::sin(moment.c * (std::numbers::pi / 2))) {}

u64 Variates::between(u64 now, u64 next) const {
  const double p = normal_cdf(cos_ * normal_quantile(unit(now)) + sin_ * normal_quantile(unit(next)));
  return p < 1 ? static_cast<u64>(p * 0x1p64) : all_ones;
}

void Variates::of_nodes(const Lanes& node, u32 count, double most, Lanes& out) const {
  node_numbers(node, count, now_, out);
  if (!smooth_) return;
  Lanes next;
  node_numbers(node, count, next_, next);
  // Two looks into a table show of most numbers that they are too large, without a logarithm.
  const double limit = most < 1 ? normal_quantile(most) + slack : std::numeric_limits<double>::infinity();
  for (u32 lane = 0; lane < count; ++lane) {
    const double least = cos_ * least_quantile[out[lane] >> (64 - table_bits)] +
                         sin_ * least_quantile[next[lane] >> (64 - table_bits)];
    out[lane] = least > limit ? all_ones : between(out[lane], next[lane]);
  }
}

u32 Variates::below(const Lanes& node, u32 count, u64 limit) const {
  if (!smooth_) return numbers_below(node, count, now_, limit);
  Lanes bits;
  of_nodes(node, count, static_cast<double>(limit) * 0x1p-64, bits);
  u32 found = 0;
  for (u32 lane = 0; lane < count; ++lane) found |= u32{bits[lane] < limit} << lane;
  return found;
}

}  // namespace gids::sampler
