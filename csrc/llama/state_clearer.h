// Clears the state that a request of a recurrent model begins with. llama.cpp multiplies whatever lies there by 0,
// which leaves NaN and infinity where they are: one request, or one rejected draft, whose numbers overflow would be the
// end of all that come after it.
#pragma once

#include "release_ggml.h"

namespace pyfly {

class StateClearer : public ggml_internal::TensorTraits {
  public:
    // Whether this operation multiplies a part of a memory by 0, in place.
    static bool is_clearing(const ggml_tensor * op);

    bool work_size(int n_threads, const ggml_tensor * op, size_t & size) override;
    bool compute_forward(ggml_internal::ComputeParams * params, ggml_tensor * op) override;
};

} // namespace pyfly
