// The buffer type that brings kernels/ into llama.cpp: weights that are loaded into it are packed, and the CPU backend
// multiplies with them by our products, in its own graph, threads and memory. ggml's list of extra buffer types (AMX
// and its own repacking are entries of it) gets one entry more, in front.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "kernels/formats.h"

namespace pyfly {

class PackedBuffers {
  public:
    // Puts the buffer type into the list, once for the process; it takes no weights yet. Returns why that is
    // impossible, to follow "kernels: ", or nothing. llama.cpp reads the list when it loads its first model: later it
    // is too late.
    static std::string install();

    // Models that are loaded while one lives, on its thread, get packed weights of the types whose bit, 1 << type, is
    // set, and no others. Nothing is taken unless install() has succeeded.
    class Taking {
      public:
        explicit Taking(uint64_t types);
        ~Taking();
        Taking(const Taking &) = delete;
        Taking & operator=(const Taking &) = delete;

      private:
        std::optional<uint64_t> before_;
    };

    // The same for all other models of the process, from now on.
    static void take_everywhere(uint64_t types);

    // What one multiplication gave.
    struct Trial {
        double error; // largest difference from the product of the dequantised weights, as a share of the sum of
                      // magnitudes: about 1e-3 where activations are quantised, 1e-6 where not
        double us;    // shortest time of `n_repeats`
    };

    // Multiplies a matrix of this type, 512 x n_out, with n_rows rows on n_threads threads of the CPU backend, packed
    // or plain. n_out is a multiple of 64. Throws Error(PYFLY_STATUS_NATIVE) where ggml refuses. Packed: needs
    // install().
    static Trial multiply(kernels::WeightType type, int64_t n_out, int32_t n_rows, int32_t n_threads, int32_t n_repeats,
                          bool is_packed);
};

} // namespace pyfly
