// The buffer type that brings kernels/ into llama.cpp: weights that are loaded into it are packed, and the CPU backend
// multiplies with them by our products, in its own graph, threads and memory. ggml's list of extra buffer types (AMX and
// its own repacking are entries of it) gets one entry more, in front.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/formats.h"

namespace pyfly {

class PackedBuffers {
  public:
    // Puts the buffer type into the list, once for the process; it takes no weights yet. Returns why that is impossible,
    // to follow "kernels: ", or nothing. llama.cpp reads the list when it loads its first model: later it is too late.
    static std::string install();

    // Whether models that are loaded on this thread from now on get packed weights: of the types whose bit, 1 << type, is
    // set. Nothing is taken unless install() has succeeded.
    static void take(uint64_t types);

    // Multiplies a small matrix of this type, random but the same each time, with n_rows rows by the CPU backend, packed
    // and plain. Returns the largest difference from the product of the dequantised weights, as a share of the sum of
    // magnitudes: about 1e-3 where activations are quantised, 1e-6 where not. Throws Error(PYFLY_STATUS_NATIVE) where
    // ggml refuses. Needs install().
    static double error_of(kernels::WeightType type, int32_t n_rows, bool is_packed);
};

} // namespace pyfly
