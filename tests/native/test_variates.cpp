// sources:
// The functions behind dependent minibatches against the standard library's, tails included. No number of theirs comes
// from a library, so a few are told bit by bit: every compiler, processor and GPU is to have these.
#include <bit>
#include <cmath>

#include "check.h"
#include "gids/variates.h"

using namespace gids;

namespace {

bool close(double a, double b, double relative) { return std::abs(a - b) <= relative * std::abs(b); }

void logarithms_and_powers_are_those_of_the_library() {
  for (double x = 0x1p-54; x < 4; x *= 1.0009)
    CHECK(close(variates::log(x), std::log(x), 4e-16) || std::abs(x - 1) < 1e-2);
  for (double x = 0.99; x < 1.01; x += 1e-5)
    CHECK(std::abs(variates::log(x) - std::log(x)) < 4e-18 + 1e-15 * std::abs(x - 1));
  for (double x = -699; x <= 0; x += 0.0137) CHECK(close(variates::exp(x), std::exp(x), 4e-16 + 1e-18 * -x));
}

void the_normal_distribution_and_its_inverse_agree_to_the_tails() {
  for (double x = -12; x <= 12; x += 0.0017) {
    const double p = 0.5 * std::erfc(-x / std::sqrt(2.0));
    CHECK(std::abs(variates::normal_cdf(x) - p) < 2e-15);
    CHECK(close(variates::normal_cdf(x), p, 2e-8));  // in the lower tail too
  }
  CHECK(variates::normal_cdf(-40) == 0);
  CHECK(variates::normal_cdf(40) == 1);
  for (double tail = 0x1p-54; tail < 0.5; tail *= 1.003) {
    CHECK(close(variates::normal_cdf(variates::normal_quantile(tail)), tail, 2e-8));
    const double p = 1 - tail;
    if (p < 1) CHECK(std::abs(variates::normal_cdf(variates::normal_quantile(p)) - p) < 2e-15);
  }
}

void numbers_stay_within_0_and_1() {
  const variates::Variates half{1, 2, std::sqrt(0.5), std::sqrt(0.5)};
  CHECK(half.between(0, 0) < u64{1} << 20);
  CHECK(half.between(~u64{0}, ~u64{0}) > ~u64{0} - (u64{1} << 20));
  const u64 middle = u64{1} << 63;
  CHECK(half.between(middle, middle) - middle + 4096 < 8192);
}

void every_machine_has_the_same_bits() {
  CHECK_EQUAL(std::bit_cast<u64>(variates::log(0.01)), u64{13840243015965562134u});
  CHECK_EQUAL(std::bit_cast<u64>(variates::exp(-3.3)), u64{4585476245642657412u});
  CHECK_EQUAL(std::bit_cast<u64>(variates::normal_cdf(-1.7)), u64{4586583381082929412u});
  CHECK_EQUAL(std::bit_cast<u64>(variates::normal_quantile(0.003)), u64{13836741909266586044u});
  CHECK_EQUAL(std::bit_cast<u64>(variates::normal_quantile(0.3)), u64{13826270636307301882u});
  const variates::Variates some{0x123456789ABCDEF0, 42, 0.6, 0.8};
  CHECK_EQUAL(some.of_node(7), u64{12605580128327643136u});
  CHECK_EQUAL(some.of_edges(7).of_node(7), u64{11498337313095233536u});
}

}  // namespace

int main() {
  logarithms_and_powers_are_those_of_the_library();
  the_normal_distribution_and_its_inverse_agree_to_the_tails();
  numbers_stay_within_0_and_1();
  every_machine_has_the_same_bits();
}
