// Random numbers. No llama.h.
#pragma once

#include <cstdint>

namespace pyfly {

// A stream of independent numbers (SplitMix64: Steele et al. 2014, "Fast splittable pseudorandom number generators").
class Random {
  public:
    explicit Random(uint64_t seed = 0) : state_(mix(seed)) {}

    // The next number of [0, 1), a multiple of 2^-53.
    double uniform() {
        state_ += 0x9E3779B97F4A7C15U;
        return static_cast<double>(mix(state_) >> 11) * 0x1p-53;
    }

  private:
    static uint64_t mix(uint64_t z) {
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9U;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBU;
        return z ^ (z >> 31);
    }

    uint64_t state_;
};

} // namespace pyfly
