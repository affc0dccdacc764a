#include "layer_tap.h"

#include <cstdlib>
#include <cstring>

#include "ggml-backend.h"
#include "llama_model.h"
#include "release.h"
#include "release_llama.h"

namespace pyfly {

namespace {

constexpr char node_name[] = "l_out-";

// The layer that reads this node; 0: none does.
uint32_t layer_behind(const ggml_tensor * node) {
    constexpr size_t n = sizeof(node_name) - 1;
    const char * name = ggml_get_name(node);
    return std::strncmp(name, node_name, n) == 0 ? static_cast<uint32_t>(std::atoi(name + n)) + 1 : 0;
}

} // namespace

bool LayerTap::on_node(ggml_tensor * node, bool asks, void * tap) {
    LayerTap & self = *static_cast<LayerTap *>(tap);
    if (self.rows_.empty() || node->type != GGML_TYPE_F32) {
        return !asks;
    }
    const auto found = self.rows_.find(layer_behind(node));
    const size_t n_new = static_cast<size_t>(ggml_nelements(node));
    if (found == self.rows_.end() || found->second.size() + n_new > self.n_ * static_cast<size_t>(node->ne[0])) {
        return !asks; // not of our batch
    }
    if (!asks) {
        std::vector<float> & rows = found->second;
        rows.resize(rows.size() + n_new);
        ggml_backend_tensor_get(node, rows.data() + (rows.size() - n_new), 0, n_new * sizeof(float));
    }
    return true;
}

void LayerTap::keep(uint32_t layer, bool is_kept) {
    if (is_kept) {
        rows_[layer];
    } else {
        rows_.erase(layer);
    }
}

void LayerTap::begin(size_t n) {
    n_ = n;
    for (auto & [layer, rows] : rows_) {
        rows.clear();
    }
}

const float * LayerTap::rows(uint32_t layer, size_t width) const {
    const auto found = rows_.find(layer);
    return found == rows_.end() || found->second.size() != n_ * width ? nullptr : found->second.data();
}

LayerInputs layer_inputs(const std::string & architecture, bool is_recurrent) {
    if (!has_nextn) { // heads give their own hidden states that way
        return LayerInputs::none;
    }
    if (has_layer_inputs && is_known(publishing, architecture)) {
        return LayerInputs::published;
    }
    return is_recurrent || llama_supports_gpu_offload() ? LayerInputs::none : LayerInputs::tapped;
}

LayerInputs layer_inputs(const llama_model * model) {
    return layer_inputs(model_architecture(model), is_recurrent(model));
}

} // namespace pyfly
