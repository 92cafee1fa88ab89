// CHECK: what the native tests assert with. A failure names file, line and expression, and ends the test
// program with status 1.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <iostream>

#define CHECK(expression)                                                                      \
  do {                                                                                         \
    if (!(expression)) {                                                                       \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #expression);      \
      std::exit(1);                                                                            \
    }                                                                                          \
  } while (false)

#define CHECK_EQUAL(a, b)                                                                      \
  do {                                                                                         \
    const auto left = (a);                                                                     \
    const auto right = (b);                                                                    \
    if (!(left == right)) {                                                                    \
      std::cerr << __FILE__ << ":" << __LINE__ << ": CHECK_EQUAL(" #a ", " #b ") failed: "     \
                << left << " and " << right << std::endl;                                      \
      std::exit(1);                                                                            \
    }                                                                                          \
  } while (false)
