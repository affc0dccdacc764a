#include "state_clearer.h"

#include <cstring>

namespace pyfly {

bool StateClearer::is_clearing(const ggml_tensor * op) {
    float factor, bias;
    std::memcpy(&factor, op->op_params, sizeof(float));
    std::memcpy(&bias, op->op_params + 1, sizeof(float));
    return op->op == GGML_OP_SCALE && factor == 0.0f && bias == 0.0f && op->type == GGML_TYPE_F32 &&
           op->data == op->src[0]->data && ggml_is_contiguous(op) && op->view_src != nullptr &&
           op->view_src->op == GGML_OP_NONE;
}

bool StateClearer::work_size(int, const ggml_tensor *, size_t &) {
    return false;
}

// By one thread, as llama.cpp's is of one row: should the kernels be enabled while a graph runs, all agree on who does
// it.
bool StateClearer::compute_forward(ggml_internal::ComputeParams * params, ggml_tensor * op) {
    if (params->thread == 0) {
        std::memset(op->data, 0, ggml_nbytes(op));
    }
    return true;
}

} // namespace pyfly
