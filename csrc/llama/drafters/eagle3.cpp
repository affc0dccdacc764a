#include "eagle3.h"

#include <algorithm>
#include <cstring>

#include "error.h"
#include "guard.h"
#include "llama/release_llama.h"

namespace pyfly {

ModelPointer Eagle3::open(const llama_model * target, const ModelFile & file, const OpenDraft & open) {
    const std::string what = "the EAGLE-3 head '" + file.path() + "'";
    const auto refuse = [](const std::string & why) { throw Error(PYFLY_STATUS_INCOMPATIBLE, why); };
    const auto number = [](int64_t n) { return std::to_string(n); };
    const int64_t n_embd = llama_model_n_embd(target);

    if (file.architecture() != "eagle3") {
        refuse("'" + file.path() + "' is of architecture " + file.architecture() +
               ", not an EAGLE-3 head; if it is a model, use {draft_model}");
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
    require_layer_head(target, file, what);
    ModelPointer model = open_sharing_vocabulary(target, file, open, "EAGLE-3 head", DraftKind::head);
    require_target_layers(target, model.get(), what);
    return model;
}

HeadDrafter::Parts Eagle3::load(const LlamaTarget & target, const pyfly_draft_model_config & config) {
    const llama_model * target_model = llama_get_model(target.context());
    ModelPointer model =
        open(target_model, ModelFile(config.model_path ? config.model_path : ""), open_with_weights(target, config));
    llama_context_params params = draft_context_params(target, config);
    params.ctx_other = target.context();
    ContextPointer context = make_draft_context(target, model.get(), params, "EAGLE-3 head");
    const size_t row_width =
        llama_model_target_layer_ids_n(model.get()) * static_cast<size_t>(llama_model_n_embd(target_model));
    const size_t n_embd_own = static_cast<size_t>(llama_model_n_embd(model.get()));
    const Shape shape = {"EAGLE-3 head", row_width, n_embd_own, 1, 1, 1};
    return {std::move(model), std::move(context), followed_pool(target, config), shape};
}

Eagle3::Eagle3(LlamaTarget & target, const pyfly_draft_model_config & config)
    : StepHead(load(target, config), config.p_min), rows_(target, llama_get_model(own().context())) {}

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
