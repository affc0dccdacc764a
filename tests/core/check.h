// What the tests of the kernels share: checks that are counted, and go on.
#pragma once

#include <cstdio>
#include <string>

inline int n_failed = 0;

inline void check(bool is_right, const std::string & what) {
    if (!is_right) {
        std::printf("FAILED: %s\n", what.c_str());
        n_failed++;
    }
}
