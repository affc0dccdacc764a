// Our kernels and llama.cpp's own, tried by a small graph through the CPU backend.
#pragma once

#include <cstdint>

#include "kernels/formats.h"

namespace pyfly {

struct KernelTrial {
    double error; // largest difference from the right result, as a share of the sum of magnitudes
    double us;    // the shortest time, microseconds
};

// How often, with how many rows and threads, and whether with packed weights, which needs PackedBuffers::enable().
struct TrialSetup {
    int32_t n_rows, n_threads, n_repeats;
    bool is_ours;
};

// Multiplies a matrix of this type, 512 x n_out, by rows. n_out is a multiple of 64. The right result is that of the
// dequantised weights; errors are about 1e-3 where activations are quantised, 1e-6 where not. Throws
// Error(PYFLY_STATUS_NATIVE) where ggml refuses.
KernelTrial try_product(kernels::WeightType type, int64_t n_out, const TrialSetup & setup);

// The same product for 1 to 32 rows on n_threads >= 1 threads, compared with each row alone: bit n - 1 is set if a
// batch of n rows gives any row another bit. Throws likewise.
uint32_t batches_with_other_bits(kernels::WeightType type, int64_t n_out, int32_t n_threads, bool is_ours);

// The last n_rows of n_cells tokens attend to all before them: eight heads of 128 numbers, four of which share keys and
// values. Throws likewise.
KernelTrial try_attention(int64_t n_cells, const TrialSetup & setup);

} // namespace pyfly
