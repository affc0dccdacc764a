// The buffer type that brings kernels/ into llama.cpp: weights that are loaded into it are packed, and the CPU backend
// multiplies with them by our products, in its own graph, threads and memory; attention is ours likewise. ggml's list
// of extra buffer types (AMX and its own repacking are entries of it) gets one entry more, in front.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ggml-backend.h"

namespace pyfly {

// The tensor itself, where it is a view of one: a graph may count a weight's matrices otherwise (RWKV 6).
inline const ggml_tensor * whole(const ggml_tensor * tensor) {
    return tensor->view_src != nullptr ? tensor->view_src : tensor;
}

class PackedBuffers {
  public:
    // Puts the buffer type into the list, once for the process; ggml calls nothing of it yet that hangs on how it is
    // laid out. Returns why that is impossible, to follow "kernels: ", or nothing. llama.cpp reads the list when it
    // loads its first model: later it is too late.
    static std::string install();

    // From now on ggml asks it, once for the process; it takes no weights yet. Installs it, and looks at how ggml calls
    // an operation before it computes one. Returns why that is impossible, likewise.
    static std::string enable();

    // What models get that are loaded: weights of the types whose bit, 1 << type, is set, are packed, and no others.
    // With `attention`, attention is computed by CpuAttention if its queries are products of these weights. With
    // `locked`, packed weights are kept from being swapped out. A packed buffer keeps what it was made with: a graph is
    // planned by one thread and computed by others.
    static constexpr uint64_t attention = uint64_t{1} << 63, locked = uint64_t{1} << 62;

    // For models that are loaded while one lives, on its thread. At most n_threads threads pack weights; 0: as many as
    // there are processors. Nothing is taken unless enable() has succeeded.
    class Taking {
      public:
        explicit Taking(uint64_t what, int32_t n_threads = 0);
        ~Taking();
        Taking(const Taking &) = delete;
        Taking & operator=(const Taking &) = delete;

        const uint64_t what;
        const int32_t n_threads;
        size_t n_unlocked = 0; // bytes that the system refused to lock

      private:
        Taking * before_;
    };

    // The same for all other models of the process, from now on.
    static void take_everywhere(uint64_t what);

    // The buffer type; null unless install() has succeeded.
    static ggml_backend_buffer_type_t type();

    // Whether this operation of a graph is computed by us.
    static bool computes(const ggml_tensor * op);

    // Models that are loaded from now on are not offered the extra buffer type of this name ("AMX"). False unless
    // install() has succeeded. Not while another thread loads a model.
    static bool leave_out(const char * name);

    // Whether weights of this type and shape can be packed on this machine.
    static bool can_hold(const ggml_tensor * weights);

    // Where llama.cpp would put these weights without us: the first of its extra buffer types that takes them.
    static ggml_backend_buffer_type_t stock_type(const ggml_tensor * weights);
};

} // namespace pyfly
