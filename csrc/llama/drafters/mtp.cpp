#include "mtp.h"

#include <cstring>

#include "error.h"
#include "guard.h"
#include "llama/release_llama.h"

namespace pyfly {

namespace {

[[noreturn]] void refuse(pyfly_status status, const std::string & why) {
    throw Error(status, why);
}

void require_depth(int32_t draft_max, const std::string & architecture, int32_t n_heads, const std::string & what) {
    if (draft_max > mtp_draft_max(architecture, n_heads)) {
        refuse(PYFLY_STATUS_INVALID, "{draft_max} is " + std::to_string(draft_max) + ", but " + what + " has " +
                                         std::to_string(n_heads) +
                                         " chained NextN layers, which draft one token each; lower {draft_max}");
    }
}

} // namespace

ModelPointer Mtp::open(const llama_model * target, const ModelFile & file, int32_t draft_max, const OpenDraft & open) {
    const std::string what = "the MTP head '" + file.path() + "'", architecture = model_architecture(target);
    file.require_mtp();
    if (file.architecture() != architecture) {
        refuse(PYFLY_STATUS_INCOMPATIBLE, what + " is for models of architecture " + file.architecture() +
                                              ", the target's is " + architecture +
                                              "; use the head of this very model");
    }
    const int64_t width = file.integer("embedding_length").value_or(0), target_width = llama_model_n_embd(target);
    if (width != target_width) {
        refuse(PYFLY_STATUS_INCOMPATIBLE, what + " reads hidden states of width " + std::to_string(width) +
                                              ", the target's have " + std::to_string(target_width) +
                                              "; use the head of this very model");
    }
    require_depth(draft_max, architecture, file.n_nextn(), what);
    return open_sharing_vocabulary(target, file, open, "MTP head", DraftKind::mtp_head);
}

// Checks everything that must hold before a context may be made.
HeadDrafter::Parts Mtp::load(const LlamaTarget & target, const pyfly_draft_model_config & config, int32_t draft_max,
                             bool is_loaded) {
    const llama_model * target_model = llama_get_model(target.context());
    int32_t n_heads = llama_model_n_layer_nextn(target_model);
    ModelPointer model;
    if (config.model_path == nullptr) {
        const std::string architecture = model_architecture(target_model);
        if (mtp_draft_max(architecture, n_heads) < 1) {
            refuse(PYFLY_STATUS_INCOMPATIBLE, "the model has no MTP head that llama.cpp can run (" +
                                                  std::to_string(n_heads) + " NextN layers, architecture " +
                                                  architecture + "); choose another drafter");
        }
        if (!is_loaded) {
            refuse(PYFLY_STATUS_INVALID,
                   "the model was loaded without its MTP head; load it again with drafter=MTP() from the start");
        }
        require_depth(draft_max, architecture, n_heads, "the model");
    } else {
        const ModelFile file(config.model_path);
        n_heads = file.n_nextn();
        model = open(target_model, file, draft_max, open_with_weights(target, config));
    }
    llama_context_params params = draft_context_params(target, config);
    params.ctx_type = LLAMA_CONTEXT_TYPE_MTP;
    params.ctx_other = target.context();
    // llama.cpp only reads the model; its signature does not say so.
    llama_model * shared = model ? model.get() : const_cast<llama_model *>(target_model);
    ContextPointer context = make_draft_context(target, shared, params, "MTP head");
    const size_t width = static_cast<size_t>(llama_model_n_embd_out(shared));
    return {
        std::move(model), std::move(context), followed_pool(target, config), {"MTP head", width, width, 1, 0, n_heads}};
}

Mtp::Mtp(LlamaTarget & target, const pyfly_draft_model_config & config, int32_t draft_max, bool is_loaded)
    : StepHead(load(target, config, draft_max, is_loaded), config.p_min), target_(target) {
    target_.keep_nextn(true);
}

Mtp::~Mtp() {
    target_.keep_nextn(false);
}

void Mtp::read_rows(size_t span, size_t begin, size_t n, float * out) {
    const float * rows = target_.nextn_rows(span, begin);
    if (rows == nullptr) {
        throw Error(PYFLY_STATUS_INTERNAL, "llama.cpp kept no hidden states for the MTP head");
    }
    std::memcpy(out, rows, n * shape().row_width * sizeof(float));
}

void Mtp::make_inputs(const float * rows, size_t n, float * out) {
    std::memcpy(out, rows, n * shape().row_width * sizeof(float));
}

void Mtp::select(int32_t step) {
    if (shape().n_heads > 1) {
        llama_set_nextn_layer_offset(own().context(), step);
    }
}

} // namespace pyfly

extern "C" pyfly_status pyfly_drafter_mtp_new(pyfly_target * target, const pyfly_draft_model_config * config,
                                              int32_t draft_max, int32_t is_loaded, pyfly_drafter ** out,
                                              pyfly_error * error) {
    return pyfly::guard(error, [&] {
        *out = new pyfly_drafter{
            std::make_unique<pyfly::Mtp>(pyfly::llama_target(target), *config, draft_max, is_loaded != 0)};
    });
}
