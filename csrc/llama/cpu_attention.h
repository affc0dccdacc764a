// Attention on the CPU by kernels/attention.h, inside llama.cpp's graph: of GGML_OP_FLASH_ATTN_EXT with cells of
// F16, BF16, Q8_0 or Q4_0. llama.cpp's own depends on the batch and on the threads: one token's cells are split by
// threads from 512 on, 64 tokens and more are computed in tiles, and what lies between adds up in F16, cell by cell,
// for each query alone.
#pragma once

#include "cell_order.h"

namespace pyfly {

class CpuAttention : public ggml_internal::TensorTraits {
  public:
    // Whether this operation can be computed here. The same answer for the same operation, from every thread.
    static bool can_compute(const ggml_tensor * op);

    bool work_size(int n_threads, const ggml_tensor * op, size_t & size) override;
    bool compute_forward(ggml_internal::ComputeParams * params, ggml_tensor * op) override;

    // The library's: where all threads of a graph wait, and what tells them whose turn it is.
    ggml_internal::Barrier barrier = nullptr;
    ggml_internal::SetChunk set_chunk = nullptr;
    ggml_internal::AddChunk add_chunk = nullptr;

    CellOrder order; // of every cache that is attended to
};

} // namespace pyfly
