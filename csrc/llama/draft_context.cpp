#include "draft_context.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "abort_guard.h"
#include "error.h"
#include "packed_buffers.h"
#include "release_llama.h"

namespace pyfly {

namespace {

// A model's devices, and a null pointer behind the last; empty where llama.cpp does not say.
std::vector<ggml_backend_dev_t> devices_of(const llama_model * model) {
    std::vector<ggml_backend_dev_t> devices;
    for (int32_t i = 0; i < llama_model_n_devices(model); i++) {
        devices.push_back(llama_model_get_device(model, i));
    }
    if (!devices.empty()) {
        devices.push_back(nullptr);
    }
    return devices;
}

void load_head([[maybe_unused]] llama_model_params & params, [[maybe_unused]] bool is_loaded) {
#if PYFLY_HAS_LOAD_MTP
    params.load_mtp = is_loaded;
#endif
}

bool has_texts(const llama_vocab * vocabulary) {
    return llama_vocab_type(vocabulary) != LLAMA_VOCAB_TYPE_NONE;
}

std::string differs(const char * what, int64_t target, int64_t draft) {
    return std::string("the draft's ") + what + " is " + std::to_string(draft) + ", the target's " +
           std::to_string(target);
}

std::string token_differs(int32_t token, std::string_view target, std::string_view draft) {
    return "token " + std::to_string(token) + " is '" + std::string(target) + "' in the target and '" +
           std::string(draft) + "' in the draft";
}

// The first token that is another one by the draft's header alone; empty if there may be none. llama.cpp names empty
// tokens and cuts an ending off others, so these do not count.
std::string difference_in_header(const llama_vocab * target, const ModelFile & draft) {
    const int32_t n = has_texts(target) ? llama_vocab_n_tokens(target) : 0;
    for (int32_t token = 0; token < n && static_cast<size_t>(token) < draft.n_tokens(); token++) {
        const std::string_view a = llama_vocab_get_text(target, token), b = draft.token(static_cast<size_t>(token));
        if (!b.empty() && b.substr(0, a.size()) != a) {
            return token_differs(token, a, b);
        }
    }
    return {};
}

// The first difference, empty if there is none.
std::string vocabulary_difference(const llama_vocab * target, const llama_vocab * draft, int32_t n_spare) {
    if (llama_vocab_type(target) != llama_vocab_type(draft)) {
        return differs("tokenizer type", llama_vocab_type(target), llama_vocab_type(draft));
    }
    const int32_t n_target = llama_vocab_n_tokens(target);
    const int32_t n_draft = llama_vocab_n_tokens(draft);
    // The text of tokens first: it says more than two numbers do.
    for (int32_t token = 0; has_texts(target) && token < std::min(n_target, n_draft); token++) {
        const std::string_view a = llama_vocab_get_text(target, token), b = llama_vocab_get_text(draft, token);
        if (a != b) {
            return token_differs(token, a, b);
        }
    }
    if (std::abs(n_target - n_draft) > (has_texts(target) ? n_spare : 0)) {
        return differs("vocabulary size", n_target, n_draft);
    }
    const bool adds_bos = llama_vocab_get_add_bos(target) || llama_vocab_get_add_bos(draft);
    if (adds_bos && llama_vocab_bos(target) != llama_vocab_bos(draft)) {
        return differs("BOS token", llama_vocab_bos(target), llama_vocab_bos(draft));
    }
    const bool adds_eos = llama_vocab_get_add_eos(target) || llama_vocab_get_add_eos(draft);
    if (adds_eos && llama_vocab_eos(target) != llama_vocab_eos(draft)) {
        return differs("EOS token", llama_vocab_eos(target), llama_vocab_eos(draft));
    }
    return {};
}

ModelPointer load(const ModelFile & file, const llama_model_params & params, uint64_t kernel_types, int32_t n_threads,
                  const char * what) {
    ModelPointer model;
    {
        const AbortGuard guard;
        const PackedBuffers::Taking taking(kernel_types, n_threads);
        model.reset(llama_model_load_from_file(file.path().c_str(), params));
    }
    if (!model) {
        throw Error(PYFLY_STATUS_NATIVE, std::string("llama.cpp could not load the ") + what + " '" + file.path() +
                                             "'{log}; check that it is a complete GGUF file");
    }
    return model;
}

} // namespace

uint64_t vocabulary_hash(const llama_vocab * vocabulary) {
    uint64_t hash = 14695981039346656037u; // FNV-1a
    const auto add = [&](const void * data, size_t n) {
        for (size_t i = 0; i < n; i++) {
            hash = (hash ^ static_cast<const uint8_t *>(data)[i]) * 1099511628211u;
        }
    };
    const int32_t n = llama_vocab_n_tokens(vocabulary);
    const int32_t numbers[] = {llama_vocab_type(vocabulary), n, llama_vocab_bos(vocabulary),
                               llama_vocab_eos(vocabulary)};
    add(numbers, sizeof(numbers));
    for (int32_t token = 0; has_texts(vocabulary) && token < n; token++) {
        const char * text = llama_vocab_get_text(vocabulary, token);
        add(text, std::strlen(text) + 1);
    }
    return hash;
}

double require_p_min(double p_min) {
    if (!(p_min >= 0.0 && p_min <= 1.0)) {
        throw Error(PYFLY_STATUS_INVALID, "p_min must be in [0, 1]");
    }
    return p_min;
}

OpenDraft open_with_weights(const LlamaTarget & target, const pyfly_draft_model_config & config) {
    return [&](const ModelFile & file, const char * what, DraftKind kind) {
        llama_model_params params = llama_model_default_params();
        params.n_gpu_layers = config.n_gpu_layers;
        load_head(params, kind == DraftKind::mtp_head);
        params.devices = reinterpret_cast<ggml_backend_dev_t *>(config.devices);
        std::vector<ggml_backend_dev_t> of_target;
        if (params.devices == nullptr && kind != DraftKind::model) {
            of_target = devices_of(llama_get_model(target.context()));
            params.devices = of_target.empty() ? nullptr : of_target.data();
        }
        params.use_extra_bufts = config.use_extra_bufts != 0;
        const int32_t n_threads = config.n_threads > 0 ? config.n_threads : target.thread_pool().size().n_batch;
        return load(file, params, config.kernel_types, n_threads, what);
    };
}

ModelPointer open_without_weights(const ModelFile & file, const char * what, DraftKind kind) {
    llama_model_params params = llama_model_default_params();
    params.n_gpu_layers = 0;
    params.load_mode = LLAMA_LOAD_MODE_NONE;
    params.no_alloc = true;
    load_head(params, kind == DraftKind::mtp_head);
    params.use_extra_bufts = false;
    return load(file, params, 0, 0, what);
}

ModelPointer open_sharing_vocabulary(const llama_model * target, const ModelFile & file, const OpenDraft & open,
                                     const char * what, DraftKind kind, int32_t n_spare, const char * remedy) {
    const auto require_none = [&](const std::string & difference) {
        if (!difference.empty()) {
            throw Error(PYFLY_STATUS_INCOMPATIBLE, std::string("the ") + what + " '" + file.path() +
                                                       "' does not share the target's vocabulary: " + difference +
                                                       "; " + remedy);
        }
    };
    const llama_vocab * vocabulary = llama_model_get_vocab(target);
    require_none(difference_in_header(vocabulary, file)); // many files are looked at, and opening one is slow
    ModelPointer model = open(file, what, kind);
    require_none(vocabulary_difference(vocabulary, llama_model_get_vocab(model.get()), n_spare));
    return model;
}

llama_context_params draft_context_params(const LlamaTarget & target, const pyfly_draft_model_config & config) {
    llama_context_params params = llama_context_default_params();
    params.n_seq_max = static_cast<uint32_t>(target.n_sequences());
    params.kv_unified = target.n_sequences() > 1;
    params.n_ctx = config.n_ctx > 0 ? static_cast<uint32_t>(config.n_ctx) * params.n_seq_max
                                    : static_cast<uint32_t>(target.n_cells());
    params.n_batch =
        config.n_batch > 0 ? static_cast<uint32_t>(config.n_batch) : static_cast<uint32_t>(target.n_batch());
    params.n_batch = std::clamp(params.n_batch, uint32_t{2}, params.n_ctx); // two tokens follow a fully accepted draft
    params.n_ubatch = std::min(params.n_batch, llama_n_ubatch(target.context()));
    const ThreadPool::Size threads = target.thread_pool().size();
    params.n_threads = config.n_threads > 0 ? config.n_threads : threads.n;
    params.n_threads_batch = config.n_threads > 0 ? config.n_threads : threads.n_batch;
    params.flash_attn_type = static_cast<llama_flash_attn_type>(config.flash_attn);
    params.offload_kqv = config.offload_kqv != 0;
    if (config.type_k >= 0) {
        params.type_k = static_cast<ggml_type>(config.type_k);
    }
    if (config.type_v >= 0) {
        params.type_v = static_cast<ggml_type>(config.type_v);
        if (ggml_is_quantized(params.type_v) && params.flash_attn_type == LLAMA_FLASH_ATTN_TYPE_DISABLED) {
            throw Error(PYFLY_STATUS_INVALID, std::string("the draft's type_v is ") + ggml_type_name(params.type_v) +
                                                  ", which needs flash attention; load the target with {flash_attn}");
        }
    }
    return params;
}

ThreadPool * followed_pool(const LlamaTarget & target, const pyfly_draft_model_config & config) {
    return config.n_threads > 0 ? nullptr : &target.thread_pool();
}

ContextPointer make_draft_context(const LlamaTarget & target, llama_model * model, const llama_context_params & params,
                                  const char * what) {
    ContextPointer context;
    {
        const AbortGuard guard;
        context.reset(llama_init_from_model(model, params));
    }
    if (!context || llama_get_memory(context.get()) == nullptr) {
        throw Error(PYFLY_STATUS_NATIVE, std::string("llama.cpp could not create a context for the ") + what +
                                             "; lower its n_ctx or choose another cache type");
    }
    target.thread_pool().attach(context.get());
    return context;
}

} // namespace pyfly
