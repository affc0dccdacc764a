#include "eagle3.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "error.h"
#include "guard.h"
#include "handles.h"
#include "llama/llama_ext.h"
#include "llama/model_file.h"

namespace pyfly {

namespace {

// Architectures whose graph publishes the inputs of its layers; another one aborts when they are asked for.
constexpr std::array publishing = {"bailingmoe3",    "deepseek4",  "gemma4",       "gpt-oss",   "hunyuan-dense",
                                   "hunyuan_vl",     "lfm2",       "lfm2moe",      "llama",     "mimo2",
                                   "minimax-01",     "minimax-m2", "muse-glimmer", "nanbeige",  "nemotron_h",
                                   "nemotron_h_moe", "qwen3",      "qwen35",       "qwen35moe", "qwen3moe",
                                   "qwen3next",      "qwen4exp"};

} // namespace

HeadDrafter::Parts Eagle3::load(const LlamaTarget & target, const pyfly_draft_model_config & config) {
    const ModelFile file(config.model_path ? config.model_path : "");
    const std::string what = "the EAGLE-3 head '" + file.path() + "'";
    const auto refuse = [](const std::string & why) { throw Error(PYFLY_STATUS_INCOMPATIBLE, why); };
    const auto number = [](int64_t n) { return std::to_string(n); };
    const llama_model * target_model = llama_get_model(target.context());
    const int64_t n_embd = llama_model_n_embd(target_model);
    const int64_t n_vocab = target.n_vocab();

    if (file.architecture() != "eagle3") {
        refuse("'" + file.path() + "' is of architecture " + file.architecture() +
               ", not an EAGLE-3 head; a model that drafts is DraftModel(...), a NextN head MTP(...)");
    }
    file.require_loadable();
    if (file.integer("block_count") != 1) {
        refuse(what + " has " + number(file.integer("block_count").value_or(0)) +
               " blocks, but llama.cpp runs heads of one; use another drafter");
    }
    if (file.integer("target_hidden_size") != n_embd) {
        refuse(what + " reads hidden states of width " + number(file.integer("target_hidden_size").value_or(0)) +
               ", the target's have " + number(n_embd) + "; use the head of this very model");
    }
    const std::string architecture = model_architecture(target_model);
    if (std::find(publishing.begin(), publishing.end(), architecture) == publishing.end()) {
        refuse("llama.cpp does not publish the hidden states of architecture " + architecture +
               ", which an EAGLE-3 head reads; choose another drafter");
    }
    // What the head borrows from the target must fit it, and what it has of its own must cover the vocabulary.
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

    ModelPointer model = load_draft(config, "EAGLE-3 head", false);
    require_vocabulary(target, model.get(), config, "EAGLE-3 head");
    const int32_t * layers = llama_model_target_layer_ids(model.get());
    const uint32_t n_layers = llama_model_target_layer_ids_n(model.get());
    const int32_t n_target_layers = llama_model_n_layer(target_model);
    for (uint32_t i = 0; i < n_layers; i++) {
        if (layers[i] < 0 || layers[i] >= n_target_layers) {
            refuse(what + " reads the input of layer " + number(layers[i]) + ", but the target has layers 0 to " +
                   number(n_target_layers - 1) + "; use the head of this very model");
        }
    }
    llama_context_params params = draft_context_params(target, config);
    params.ctx_other = target.context();
    ContextPointer context = make_draft_context(target, model.get(), params, "EAGLE-3 head");
    const Shape shape = {"EAGLE-3 head", n_layers * static_cast<size_t>(n_embd), static_cast<size_t>(n_embd_own), 1, 1};
    return {std::move(model), std::move(context), followed_pool(target, config), shape};
}

Eagle3::Eagle3(LlamaTarget & target, const pyfly_draft_model_config & config)
    : HeadDrafter(load(target, config), config.p_min), target_(target) {
    const llama_model * model = llama_get_model(own().context());
    const int32_t * layers = llama_model_target_layer_ids(model);
    layers_.assign(layers, layers + llama_model_target_layer_ids_n(model));
    width_ = shape().row_width / layers_.size();
    keep_layers(true);
}

Eagle3::~Eagle3() {
    keep_layers(false);
}

void Eagle3::keep_layers(bool is_kept) {
    for (const int32_t layer : layers_) {
        target_.keep_layer_input(static_cast<uint32_t>(layer), is_kept);
    }
}

// The layers' inputs side by side.
void Eagle3::read_rows(size_t span, size_t begin, size_t n, float * out) {
    for (size_t l = 0; l < layers_.size(); l++) {
        const float * rows = target_.layer_input_rows(static_cast<uint32_t>(layers_[l]), span, begin);
        for (size_t i = 0; i < n; i++) {
            std::memcpy(out + i * shape().row_width + l * width_, rows + i * width_, width_ * sizeof(float));
        }
    }
}

// The encoder. It looks at one token at a time, so a batch may be cut anywhere.
void Eagle3::make_inputs(const float * rows, size_t n, float * out) {
    const size_t width = shape().input_width, n_most = own().n_ubatch();
    for (size_t begin = 0; begin < n; begin += n_most) {
        const size_t n_batch = std::min(n_most, n - begin);
        own().encode(rows + begin * shape().row_width, n_batch);
        const float * fused = llama_get_embeddings_nextn(own().context());
        if (fused == nullptr) {
            throw Error(PYFLY_STATUS_INTERNAL, "llama.cpp kept no output of the EAGLE-3 encoder");
        }
        std::memcpy(out + begin * width, fused, n_batch * width * sizeof(float));
    }
}

} // namespace pyfly

extern "C" pyfly_status pyfly_drafter_eagle3_new(pyfly_target * target, const pyfly_draft_model_config * config,
                                                 pyfly_drafter ** out, pyfly_error * error) {
    return pyfly::guard(error, [&] {
        *out = new pyfly_drafter{std::make_unique<pyfly::Eagle3>(pyfly::llama_target(target), *config)};
    });
}
