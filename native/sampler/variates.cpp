#include "sampler/variates.h"

#include <array>
#include <cmath>
#include <limits>
#include <numbers>

namespace gids::sampler {

namespace {

using variates::normal_quantile;

constexpr u64 all_ones = ~u64{0};
constexpr u32 table_bits = 10;
constexpr double slack = 1e-7;  // far above the errors of the two functions, far below what costs anything

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

Moment moment_of(u64 seed, u64 epoch, u64 step, Dependency dependency) {
  const u64 kappa = dependency.kappa;
  const bool endless = kappa == Dependency::endless;
  const u64 group = endless ? 0 : step / kappa;
  const double c = endless || dependency.nested ? 0 : static_cast<double>(step % kappa) / static_cast<double>(kappa);
  return {random::minibatch_key(seed, epoch, group), random::minibatch_key(seed, epoch, group + 1), c};
}

Variates::Variates(const Moment& moment, u32 layer, u32 number)
    : variates::Variates{random::layer_key(moment.now, layer, number), random::layer_key(moment.next, layer, number),
                         std::cos(moment.c * (std::numbers::pi / 2)), std::sin(moment.c * (std::numbers::pi / 2))} {}

void Variates::of_nodes(const Lanes& node, u32 count, double most, Lanes& out) const {
  node_numbers(node, count, now, out);
  if (!smooth()) return;
  Lanes other;
  node_numbers(node, count, next, other);
  // Two looks into a table show of most numbers that they are too large, without a logarithm.
  const double limit = most < 1 ? normal_quantile(most) + slack : std::numeric_limits<double>::infinity();
  for (u32 lane = 0; lane < count; ++lane) {
    const double least =
        cos * least_quantile[out[lane] >> (64 - table_bits)] + sin * least_quantile[other[lane] >> (64 - table_bits)];
    out[lane] = least > limit ? all_ones : between(out[lane], other[lane]);
  }
}

u32 Variates::below(const Lanes& node, u32 count, u64 limit) const {
  if (!smooth()) return numbers_below(node, count, now, limit);
  Lanes bits;
  of_nodes(node, count, static_cast<double>(limit) * 0x1p-64, bits);
  u32 found = 0;
  for (u32 lane = 0; lane < count; ++lane) found |= u32{bits[lane] < limit} << lane;
  return found;
}

}  // namespace gids::sampler
