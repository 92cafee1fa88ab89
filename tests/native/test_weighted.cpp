// sources:
// Waiting times and estimates of neighbors drawn by weight, against the standard library's functions. No number of
// theirs comes from a library, so a few are told bit by bit: every compiler, processor and GPU is to have these.
#include <bit>
#include <cmath>
#include <limits>

#include "check.h"
#include "gids/weighted.h"

using namespace gids;

namespace {

constexpr u64 all_ones = ~u64{0};

bool close(double a, double b, double relative) { return std::abs(a - b) <= relative * std::abs(b); }

void one_minus_exp_is_that_of_the_library() {
  for (double x = 0x1p-300; x < 60; x *= 1.0007) CHECK(close(weighted::one_minus_exp(x), -std::expm1(-x), 6e-16));
  for (double x : {0.0, 1e300, std::numeric_limits<double>::infinity()})
    CHECK(weighted::one_minus_exp(x) == -std::expm1(-x));
}

void waiting_times_are_exponential_and_ordered_as_their_bits() {
  for (const float weight : {1e-45f, 0.3f, 1.0f, 3e38f})
    for (u64 bits = 0; bits < all_ones - (u64{1} << 56); bits += u64{1} << 56) {
      const double time = weighted::waiting_time(bits, weight);
      CHECK(close(time, -std::log(variates::unit(bits)) / static_cast<double>(weight), 1e-14));
      CHECK(std::isfinite(time));
      CHECK(std::bit_cast<u64>(time) > std::bit_cast<u64>(weighted::waiting_time(bits + (u64{1} << 56), weight)));
    }
  CHECK_EQUAL(std::bit_cast<u64>(weighted::waiting_time(all_ones, 2)), u64{0});  // not -0, which all others are below
}

void estimates_are_one_over_probabilities() {
  CHECK(weighted::estimate(2, 1e9) == 1);
  CHECK(close(weighted::estimate(0.5f, 0.25), 1 / (1 - std::exp(-0.125)), 1e-7));
  CHECK(weighted::replaced_estimate(3, 12, 5) == 0.8f);
  const u8 near[2] = {0b10, 0b1};
  for (u64 source = 0; source < 16; ++source) CHECK(weighted::is_near(near, source) == (source == 1 || source == 8));
  CHECK(weighted::favoured(1.5f, true, 4) == 6 && weighted::favoured(1.5f, false, 4) == 1.5f);
}

void every_machine_has_the_same_bits() {
  CHECK_EQUAL(std::bit_cast<u64>(weighted::waiting_time(0x123456789ABCDEF0, 0.7f)), u64{4615686217671149314u});
  CHECK_EQUAL(std::bit_cast<u64>(weighted::one_minus_exp(0.3)), u64{4598340623776942070u});
  CHECK_EQUAL(std::bit_cast<u64>(weighted::one_minus_exp(1.3)), u64{4604727670636908224u});
}

}  // namespace

int main() {
  one_minus_exp_is_that_of_the_library();
  waiting_times_are_exponential_and_ordered_as_their_bits();
  estimates_are_one_over_probabilities();
  every_machine_has_the_same_bits();
}
