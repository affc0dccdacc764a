#include "graph_products.h"

#include <algorithm>
#include <cctype>

#include "error.h"
#include "ggml.h"
#include "packed_buffers.h"
#include "release_llama.h"

namespace pyfly {

namespace {

// Operations that add up products. What is left is computed for each token by itself.
bool is_product(const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_MUL_MAT:
        case GGML_OP_MUL_MAT_ID:
        case GGML_OP_OUT_PROD:
        case GGML_OP_FLASH_ATTN_EXT:
            return true;
        default:
            return false;
    }
}

// A name without the number of its layer: blk.N.attn_q.weight, cache_k_lN.
std::string without_layer(const std::string & name) {
    std::string out;
    for (size_t i = 0; i < name.size();) {
        const bool is_number = i > 0 && std::isdigit(static_cast<unsigned char>(name[i])) != 0 &&
                               (name.compare(0, i, "blk.") == 0 || (i > 1 && name.compare(i - 2, 2, "_l") == 0));
        if (!is_number) {
            out += name[i++];
            continue;
        }
        out += 'N';
        while (i < name.size() && std::isdigit(static_cast<unsigned char>(name[i])) != 0) {
            i++;
        }
    }
    return out;
}

} // namespace

std::vector<GraphProduct> graph_products(llama_context * context) {
    const uint32_t n_sequences = llama_n_seq_max(context); // as llama.cpp does: some graphs end the process with fewer
    ggml_cgraph * graph = llama_graph_reserve(context, 4 * n_sequences, n_sequences, n_sequences);
    if (graph == nullptr) {
        throw Error(PYFLY_STATUS_NATIVE, "llama.cpp shows no graph of this context");
    }
    std::vector<GraphProduct> found;
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * op = ggml_graph_node(graph, i);
        if (!is_product(op)) {
            continue;
        }
        const ggml_tensor * matrix = whole(op->src[op->op == GGML_OP_FLASH_ATTN_EXT ? 1 : 0]); // the keys
        const bool is_computed = matrix->op != GGML_OP_NONE;
        const GraphProduct product = {ggml_op_name(op->op), is_computed ? "" : without_layer(ggml_get_name(matrix)),
                                      matrix->type, PackedBuffers::computes(op), 1};
        const auto same = std::find_if(found.begin(), found.end(), [&](const GraphProduct & other) {
            return other.op == product.op && other.weights == product.weights && other.type == product.type &&
                   other.is_ours == product.is_ours;
        });
        if (same != found.end()) {
            same->n++;
        } else {
            found.push_back(product);
        }
    }
    return found;
}

} // namespace pyfly
