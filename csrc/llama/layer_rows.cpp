#include "layer_rows.h"

#include <algorithm>
#include <cstring>

#include "error.h"
#include "layer_tap.h"
#include "release_llama.h"

namespace pyfly {

namespace {

[[noreturn]] void refuse(const std::string & why) {
    throw Error(PYFLY_STATUS_INCOMPATIBLE, why);
}

} // namespace

LayerRows::LayerRows(LlamaTarget & target, const llama_model * head)
    : LayerRows(target, {llama_model_target_layer_ids(head),
                         llama_model_target_layer_ids(head) + llama_model_target_layer_ids_n(head)}) {}

LayerRows::LayerRows(LlamaTarget & target, std::vector<int32_t> layers) : target_(target), layers_(std::move(layers)) {
    for (const int32_t layer : layers_) {
        target_.require_layer_input(layer);
    }
    width_ = static_cast<size_t>(llama_model_n_embd(llama_get_model(target.context())));
    for (const int32_t layer : layers_) {
        target_.keep_layer_input(static_cast<uint32_t>(layer), true);
    }
}

LayerRows::~LayerRows() {
    for (const int32_t layer : layers_) {
        target_.keep_layer_input(static_cast<uint32_t>(layer), false);
    }
}

void LayerRows::read(size_t span, size_t begin, size_t n, float * out) const {
    for (size_t l = 0; l < layers_.size(); l++) {
        const float * rows = target_.layer_input_rows(static_cast<uint32_t>(layers_[l]), span, begin);
        for (size_t i = 0; i < n; i++) {
            std::memcpy(out + (i * layers_.size() + l) * width_, rows + i * width_, width_ * sizeof(float));
        }
    }
}

void require_layer_head(const llama_model * target, const ModelFile & file, const std::string & what) {
    const auto number = [](int64_t n) { return std::to_string(n); };
    const int64_t n_embd = llama_model_n_embd(target), n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(target));
    if (layer_inputs(target) == LayerInputs::none) {
        refuse("llama.cpp does not publish the hidden states of architecture " + model_architecture(target) +
               ", which " + what + " reads; choose another drafter");
    }
    const bool has_embedding = file.has_tensor("token_embd.weight"), has_output = file.has_tensor("output.weight");
    if (file.has_tensor("d2t")) {
        if (!has_output) {
            refuse(what + " has a reduced vocabulary (d2t) without an output matrix for it; convert it again");
        }
        const std::optional<std::vector<int64_t>> ids = file.read_integers("d2t");
        if (!ids || std::any_of(ids->begin(), ids->end(), [&](int64_t id) { return id < 0 || id >= n_vocab; })) {
            refuse(what + " has a reduced vocabulary (d2t) that names tokens outside the target's " + number(n_vocab) +
                   "; convert it again");
        }
    }
    const int64_t n_embd_own = file.integer("embedding_length").value_or(0);
    if ((!has_embedding || !has_output) && n_embd_own != n_embd) {
        refuse(what + " uses the target's " + (has_embedding ? "output matrix" : "token embedding") + " but is " +
               number(n_embd_own) + " wide, the target " + number(n_embd) + "; use the head of this very model");
    }
    if (has_embedding && file.tensor_size("token_embd.weight", 1) < n_vocab) {
        refuse(what + " embeds " + number(file.tensor_size("token_embd.weight", 1)) + " tokens of the target's " +
               number(n_vocab) + "; convert it again");
    }
}

void require_target_layers(const llama_model * target, const llama_model * head, const std::string & what) {
    const int32_t n_layer = llama_model_n_layer(target);
    const int32_t * layers = llama_model_target_layer_ids(head);
    const uint32_t n_layers = llama_model_target_layer_ids_n(head);
    if (n_layers == 0) {
        refuse(what + " names no layers of the target that it reads; convert it again");
    }
    for (uint32_t i = 0; i < n_layers; i++) {
        if (layers[i] < 0 || layers[i] >= n_layer) {
            refuse(what + " reads the input of layer " + std::to_string(layers[i]) +
                   ", but the target has layers 0 to " + std::to_string(n_layer - 1) +
                   "; use the head of this very model");
        }
    }
}

} // namespace pyfly
