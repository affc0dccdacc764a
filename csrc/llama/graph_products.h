// Whether a context computes a token with the same bits alone and in a batch: which products of its graph are not ours.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "llama.h"

namespace pyfly {

// Products of a graph that are alike but for their layer. Those that are not ours llama.cpp computes its own way, and
// so rounds by the batch.
struct GraphProduct {
    std::string op;      // ggml's name of it, such as MUL_MAT or FLASH_ATTN_EXT
    std::string weights; // the name of the first of its matrices, or of the keys; empty if that is computed
    ggml_type type;      // of that matrix
    bool is_ours;
    size_t n; // how many there are
};

// Looks at the graph of a batch of four tokens of each sequence, with the adapters that are set; what the context holds
// stays. Throws Error(PYFLY_STATUS_NATIVE) where this release does not show graphs, or makes none.
std::vector<GraphProduct> graph_products(llama_context * context);

} // namespace pyfly
