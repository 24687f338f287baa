// The little that the native test programs need: CHECK counts failures and reports them, `finish` sums up.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace check {

inline int failures = 0, checks = 0;

inline bool report(bool ok, const char* what, const char* file, int line) {
  ++checks;
  if (!ok && ++failures <= 20) std::printf("%s:%d: failed: %s\n", file, line, what);
  return ok;
}

// Call at the end of main: the exit status of the test program.
inline int finish(const char* name) {
  std::printf("%s: %d checks, %d failures\n", name, checks, failures);
  return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}

}  // namespace check

#define CHECK(condition) check::report((condition), #condition, __FILE__, __LINE__)
#define CHECK_NEAR(actual, expected, tolerance)                                                                    \
  do {                                                                                                             \
    const double check_a = (actual), check_e = (expected), check_t = (tolerance);                                  \
    if (!check::report(std::fabs(check_a - check_e) <= check_t, #actual " near " #expected, __FILE__, __LINE__) && \
        check::failures <= 20)                                                                                     \
      std::printf("    %.9g instead of %.9g, off by %.3g, tolerance %.3g\n", check_a, check_e, check_a - check_e,  \
                  check_t);                                                                                        \
  } while (0)
