// Uniform random numbers that change slowly from minibatch to minibatch: the batch dependency of "Cooperative
// Minibatching in Graph Neural Networks" (Balin, LaSalle and Catalyurek, 2023, section 3.2). Shared by the host and
// the CUDA kernels, which must agree on every bit: so nothing here comes from a mathematical library but the square
// root, which IEEE 754 defines, and every operation is rounded by itself.
#pragma once

#include "gids/random.h"
#include "gids/target.h"

#if !defined(__CUDACC__) && !defined(__CUDACC_RTC__)
#include <cmath>
#endif

namespace gids::variates {

// A compiler for GPUs fuses what it may. The host's has -ffp-contract=off.
#if defined(__CUDA_ARCH__)
GIDS_HD double times(double a, double b) { return __dmul_rn(a, b); }
GIDS_HD double plus(double a, double b) { return __dadd_rn(a, b); }
GIDS_HD double over(double a, double b) { return __ddiv_rn(a, b); }
GIDS_HD double root(double a) { return __dsqrt_rn(a); }
GIDS_HD u64 bits_of(double a) { return static_cast<u64>(__double_as_longlong(a)); }
GIDS_HD double from_bits(u64 bits) { return __longlong_as_double(static_cast<i64>(bits)); }
#else
GIDS_HD double times(double a, double b) { return a * b; }
GIDS_HD double plus(double a, double b) { return a + b; }
GIDS_HD double over(double a, double b) { return a / b; }
GIDS_HD double root(double a) { return std::sqrt(a); }
GIDS_HD u64 bits_of(double a) { return __builtin_bit_cast(u64, a); }
GIDS_HD double from_bits(u64 bits) { return __builtin_bit_cast(double, bits); }
#endif

// a[0] + a[1] x + a[2] x^2 ...
template <int n>
GIDS_HD double polynomial(const double (&a)[n], double x) {
  double sum = a[n - 1];
  for (int i = n - 2; i >= 0; --i) sum = plus(times(sum, x), a[i]);
  return sum;
}

constexpr double ln2_high = 0x1.62e42fee00000p-1;  // few enough bits that its product with an exponent is exact
constexpr double ln2_low = 0x1.a39ef35793c76p-33;

// Of a normal number above 0: 2 artanh s with s = (m - 1) / (m + 1), for the number m 2^e, m about 1.
GIDS_HD double log(double x) {
  constexpr double odd[12] = {1.0,      1.0 / 3,  1.0 / 5,  1.0 / 7,  1.0 / 9,  1.0 / 11,
                              1.0 / 13, 1.0 / 15, 1.0 / 17, 1.0 / 19, 1.0 / 21, 1.0 / 23};
  const u64 bits = bits_of(x);
  int exponent = static_cast<int>(bits >> 52) - 1023;
  double m = from_bits((bits & 0xFFFFFFFFFFFFF) | u64{1023} << 52);
  if (m > 1.4142135623730951) {
    m = times(m, 0.5);
    ++exponent;
  }
  const double s = over(plus(m, -1), plus(m, 1));
  const double e = static_cast<double>(exponent);
  const double small = plus(times(times(2, s), polynomial(odd, times(s, s))), times(e, ln2_low));
  return plus(times(e, ln2_high), small);
}

// Of a number from -700 to 0: 2^k e^r, |r| about ln 2 / 2 at most.
GIDS_HD double exp(double x) {
  constexpr double inverse_factorials[14] = {
      1.0,        1.0,         1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,       1.0 / 720,
      1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
  const int k = static_cast<int>(plus(times(x, 1.4426950408889634), -0.5));  // towards 0: the nearest
  const double e = static_cast<double>(k);
  const double r = plus(plus(x, times(-e, ln2_high)), times(-e, ln2_low));
  return times(polynomial(inverse_factorials, r), from_bits(static_cast<u64>(1023 + k) << 52));
}

// Phi (Hart, "Computer Approximations", 1968, as West gives it, Wilmott 2005).
GIDS_HD double normal_cdf(double x) {
  constexpr double above[7] = {220.206867912376, 221.213596169931,  112.079291497871,    33.912866078383,
                               6.37396220353165, 0.700383064443688, 3.52624965998911e-02};
  constexpr double below[8] = {440.413735824752, 793.826512519948, 637.333633378831, 296.564248779674,
                               86.7807322029461, 16.064177579207,  1.75566716318264, 8.83883476483184e-02};
  const double a = x < 0 ? -x : x;
  double tail = 0;
  if (a < 37) {
    const double density = exp(times(times(a, a), -0.5));
    if (a < 7.07106781186547) {
      tail = times(density, over(polynomial(above, a), polynomial(below, a)));
    } else {
      double fraction = plus(a, 0.65);
      for (int i = 4; i >= 1; --i) fraction = plus(a, over(i, fraction));
      tail = over(density, times(fraction, 2.506628274631));
    }
  }
  return x < 0 ? tail : plus(1, -tail);
}

// Its inverse (Wichura, algorithm AS 241, 1988), p in (0, 1).
GIDS_HD double normal_quantile(double p) {
  constexpr double a[8] = {3.3871328727963666080e0,  1.3314166789178437745e+2, 1.9715909503065514427e+3,
                           1.3731693765509461125e+4, 4.5921953931549871457e+4, 6.7265770927008700853e+4,
                           3.3430575583588128105e+4, 2.5090809287301226727e+3};
  constexpr double b[8] = {1.0,
                           4.2313330701600911252e+1,
                           6.8718700749205790830e+2,
                           5.3941960214247511077e+3,
                           2.1213794301586595867e+4,
                           3.9307895800092710610e+4,
                           2.8729085735721942674e+4,
                           5.2264952788528545610e+3};
  constexpr double c[8] = {1.42343711074968357734e0,  4.63033784615654529590e0, 5.76949722146069140550e0,
                           3.64784832476320460504e0,  1.27045825245236838258e0, 2.41780725177450611770e-1,
                           2.27238449892691845833e-2, 7.74545014278341407640e-4};
  constexpr double d[8] = {1.0,
                           2.05319162663775882187e0,
                           1.67638483018380384940e0,
                           6.89767334985100004550e-1,
                           1.48103976427480074590e-1,
                           1.51986665636164571966e-2,
                           5.47593808499534494600e-4,
                           1.05075007164441684324e-9};
  constexpr double e[8] = {6.65790464350110377720e0,  5.46378491116411436990e0,  1.78482653991729133580e0,
                           2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
                           2.71155556874348757815e-5, 2.01033439929228813265e-7};
  constexpr double f[8] = {1.0,
                           5.99832206555887937690e-1,
                           1.36929880922735805310e-1,
                           1.48753612908506148525e-2,
                           7.86869131145613259100e-4,
                           1.84631831751005468180e-5,
                           1.42151175831644588870e-7,
                           2.04426310338993978564e-15};
  const double q = plus(p, -0.5);
  if (-0.425 <= q && q <= 0.425) {
    const double r = plus(0.180625, -times(q, q));
    return times(q, over(polynomial(a, r), polynomial(b, r)));
  }
  const double r = root(-log(q < 0 ? p : plus(1, -p)));
  const double x = r <= 5 ? over(polynomial(c, plus(r, -1.6)), polynomial(d, plus(r, -1.6)))
                          : over(polynomial(e, plus(r, -5)), polynomial(f, plus(r, -5)));
  return q < 0 ? -x : x;
}

// A number in (0, 1) from 64 random bits.
GIDS_HD double unit(u64 bits) { return times(plus(static_cast<double>(bits >> 11), 0.5), 0x1p-53); }

// Minibatches i = 0 ... kappa - 1 of a group lie between two random numbers, those of the group and of the next one.
// With c = i / kappa, normal variates n1, n2 of the two and n = cos(c pi / 2) n1 + sin(c pi / 2) n2, which is normal
// too, the number is Phi(n): uniform at every c, that of the group at c = 0 and that of the next one at c = 1.
// Everything follows from (seed, epoch, step), without state. Each number is 64 random bits.
struct Variates {
  u64 now, next;    // the keys of the group and of the next one
  double cos, sin;  // of c pi / 2

  GIDS_HD bool smooth() const { return sin > 0; }

  // Draw i of a destination.
  GIDS_HD u64 draw(u64 node, u32 i) const {
    const u64 bits = random::draw(now, node, i);
    return smooth() ? between(bits, random::draw(next, node, i)) : bits;
  }
  // The numbers of the in-edges of one destination, by their index among them.
  GIDS_HD Variates of_edges(u64 node) const {
    return {random::draw(now, node, 0), random::draw(next, node, 0), cos, sin};
  }
  // The number of a source (random::node_number).
  GIDS_HD u64 of_node(u64 node) const {
    const u64 bits = random::node_number(now, node);
    return smooth() ? between(bits, random::node_number(next, node)) : bits;
  }
  GIDS_HD u64 between(u64 one, u64 other) const {
    const double n = plus(times(cos, normal_quantile(unit(one))), times(sin, normal_quantile(unit(other))));
    const double p = normal_cdf(n);
    return p < 1 ? static_cast<u64>(times(p, 0x1p64)) : ~u64{0};
  }
};

}  // namespace gids::variates
