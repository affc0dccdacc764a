// The functions of pyfly.h that need llama.cpp.

#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

#include "abort_guard.h"
#include "draft_context.h"
#include "graph_products.h"
#include "guard.h"
#include "kept_log.h"
#include "kernel_trials.h"
#include "kernels/products.h"
#include "layer_states.h"
#include "llama/drafters/companion.h"
#include "llama_target.h"
#include "mask_sampler.h"
#include "model_file.h"
#include "packed_buffers.h"
#include "release_llama.h"
#include "target.h"

using pyfly::Error;
using pyfly::guard;

struct pyfly_layer_tap {
    pyfly::LayerTap impl;
};

struct pyfly_kernels_taking {
    pyfly::PackedBuffers::Taking impl;
};

extern "C" {

pyfly_status pyfly_target_llama_new(void * llama_context_pointer, int32_t adaptive_threads, int32_t n_requests,
                                    int32_t n_ctx, pyfly_layer_tap * tap, pyfly_target ** out, pyfly_error * error) {
    return guard(error, [&] {
        if (llama_context_pointer == nullptr) {
            throw Error(PYFLY_STATUS_INVALID, "the llama context is closed");
        }
        auto * context = static_cast<llama_context *>(llama_context_pointer);
        auto model = std::make_unique<pyfly::LlamaTarget>(context, adaptive_threads != PYFLY_THREADS_FIXED,
                                                          adaptive_threads == PYFLY_THREADS_ADAPT_ALL, n_requests,
                                                          n_ctx, tap == nullptr ? nullptr : &tap->impl);
        *out = new pyfly_target{std::move(model), pyfly::make_vocabulary(llama_get_model(context))};
    });
}

pyfly_layer_tap * pyfly_layer_tap_new(void) {
    return new pyfly_layer_tap;
}

void pyfly_layer_tap_free(pyfly_layer_tap * tap) {
    delete tap;
}

void * pyfly_layer_tap_callback(void) {
    return reinterpret_cast<void *>(&pyfly::LayerTap::on_node);
}

void * pyfly_layer_tap_user(pyfly_layer_tap * tap) {
    return &tap->impl;
}

pyfly_status pyfly_target_states(pyfly_target * target, const int32_t * layers, size_t n_layers, const int32_t * tokens,
                                 size_t n, int32_t k, uint16_t * states, uint16_t * final, int32_t * ids,
                                 float * log_probs, pyfly_error * error) {
    return guard(error, [&] {
        pyfly::read_states(pyfly::llama_target(target), {layers, layers + n_layers}, {tokens, tokens + n}, k,
                           {states, final, ids, log_probs});
    });
}

void pyfly_target_threads(const pyfly_target * target, pyfly_threads * out) {
    *out = {};
    const auto * llama = dynamic_cast<const pyfly::LlamaTarget *>(target->model.get());
    if (llama != nullptr && llama->thread_pool().policy()) {
        const pyfly::ThreadPolicy & policy = *llama->thread_pool().policy();
        *out = {policy.n_threads(), policy.n_max(), policy.n_changes(), policy.n_trials()};
    }
}

pyfly_status pyfly_chain_mask(void * llama_sampler_chain, int32_t n_vocab, pyfly_mask_callback mask, void * user,
                              pyfly_error * error) {
    return guard(error,
                 [&] { pyfly::add_mask(static_cast<llama_sampler *>(llama_sampler_chain), n_vocab, mask, user); });
}

void pyfly_load_guard(int32_t is_on) {
    thread_local std::vector<std::unique_ptr<pyfly::AbortGuard>> guards;
    if (is_on != 0) {
        guards.push_back(std::make_unique<pyfly::AbortGuard>());
    } else if (!guards.empty()) {
        guards.pop_back();
    }
}

void pyfly_log_keep(void) {
    pyfly::keep_log();
}

void pyfly_log_take_errors(char * out, size_t size) {
    std::snprintf(out, size, "%s", pyfly::take_log_errors().c_str());
}

pyfly_status pyfly_companion_word(const void * target, const char * path, char out[16], pyfly_error * error) {
    return guard(error, [&] {
        const std::string word = pyfly::companion_word(static_cast<const llama_model *>(target), path);
        std::snprintf(out, 16, "%s", word.c_str());
    });
}

pyfly_status pyfly_model_inspect(const char * path, int32_t wants_mtp, pyfly_model_info * out, pyfly_error * error) {
    return guard(error, [&] {
        const pyfly::ModelFile file(path);
        file.require_model();
        if (wants_mtp != 0) {
            file.require_mtp();
        }
        std::snprintf(out->architecture, sizeof(out->architecture), "%s", file.architecture().c_str());
        out->n_ctx_train = file.integer("context_length").value_or(0);
        out->n_positions = file.n_learned_positions();
        out->n_ctx_short = file.n_ctx_short();
        out->n_nextn = file.n_nextn();
        out->mtp_draft_max = file.mtp_draft_max();
        out->n_layer = static_cast<int32_t>(file.integer("block_count").value_or(0)) - file.n_nextn();
        const bool is_recurrent =
            file.integer("ssm.state_size") || file.integer("wkv.head_size") || file.integer("shortconv.l_cache");
        out->layer_inputs = static_cast<int32_t>(pyfly::layer_inputs(file.architecture(), is_recurrent));
        out->query_types = 0;
        for (const ggml_tensor * matrix : file.query_matrices()) {
            out->query_types |= uint64_t{1} << (pyfly::PackedBuffers::can_hold(matrix) ? matrix->type : 63);
        }
    });
}

uint64_t pyfly_target_vocabulary(const pyfly_target * target) {
    const auto * llama = dynamic_cast<const pyfly::LlamaTarget *>(target->model.get());
    return llama == nullptr ? 0 : pyfly::vocabulary_hash(llama_model_get_vocab(llama_get_model(llama->context())));
}

pyfly_status pyfly_context_memory(const void * llama_context_pointer, pyfly_memory * out, pyfly_error * error) {
    return guard(error, [&] {
        *out = {};
#if PYFLY_HAS_MEMORY_BREAKDOWN
        const auto * context = static_cast<const llama_context *>(llama_context_pointer);
        for (const auto & [type, data] : llama_get_memory_breakdown(context)) {
            (ggml_backend_buft_is_host(type) ? out->host : out->device) +=
                static_cast<int64_t>(data.context + data.compute);
        }
#else
        (void)llama_context_pointer;
#endif
    });
}

const char * pyfly_kernels_isa(void) {
    return pyfly::kernels::instruction_set();
}

pyfly_status pyfly_kernels_install(pyfly_error * error) {
    return guard(error, [&] {
        const std::string why_not = pyfly::PackedBuffers::install();
        if (!why_not.empty()) {
            throw Error(PYFLY_STATUS_NATIVE, why_not);
        }
    });
}

pyfly_status pyfly_kernels_enable(pyfly_error * error) {
    return guard(error, [&] {
        const std::string why_not = pyfly::PackedBuffers::enable();
        if (!why_not.empty()) {
            throw Error(PYFLY_STATUS_NATIVE, why_not);
        }
    });
}

const char * pyfly_ggml_build(void) {
    static const std::string build = std::string(ggml_version()) + " " + ggml_commit();
    return build.c_str();
}

pyfly_status pyfly_kernels_leave_out(const char * buffer_type, pyfly_error * error) {
    return guard(error, [&] {
        if (!pyfly::PackedBuffers::leave_out(buffer_type)) {
            throw Error(PYFLY_STATUS_NATIVE, "the kernels are not installed, so llama.cpp's list is as it was");
        }
    });
}

pyfly_kernels_taking * pyfly_kernels_take(uint64_t what, int32_t n_threads) {
    static_assert(PYFLY_KERNELS_ATTENTION == pyfly::PackedBuffers::attention);
    static_assert(PYFLY_KERNELS_LOCKED == pyfly::PackedBuffers::locked);
    return new pyfly_kernels_taking{pyfly::PackedBuffers::Taking(what, n_threads)};
}

size_t pyfly_kernels_restore(pyfly_kernels_taking * taking) {
    const size_t n_unlocked = taking->impl.n_unlocked;
    delete taking;
    return n_unlocked;
}

void pyfly_kernels_take_everywhere(uint64_t what) {
    pyfly::PackedBuffers::take_everywhere(what);
}

uint64_t pyfly_kernels_types(void) {
    uint64_t types = 0;
    for (int32_t type = 0; type < 64; type++) {
        if (pyfly::kernels::products(static_cast<pyfly::kernels::WeightType>(type), 1) != nullptr) {
            types |= uint64_t{1} << type;
        }
    }
    return types;
}

namespace {

pyfly::TrialSetup trial_setup(int32_t n_rows, int32_t n_threads, int32_t n_repeats, int32_t is_ours) {
    if (n_rows < 1 || n_threads < 1 || n_repeats < 1) {
        throw Error(PYFLY_STATUS_INVALID, "a trial needs rows, threads and repeats");
    }
    if (is_ours != 0 && !pyfly::PackedBuffers::enable().empty()) {
        throw Error(PYFLY_STATUS_INVALID, "the kernels cannot be used with this llama.cpp");
    }
    return {n_rows, n_threads, n_repeats, is_ours != 0};
}

void require_product(int32_t type, int64_t n_out) {
    if (type < 0 || type >= 64 || (pyfly_kernels_types() >> type & 1) == 0) {
        throw Error(PYFLY_STATUS_INVALID, "there are no kernels for ggml type " + std::to_string(type));
    }
    if (n_out < 64 || n_out % 64 != 0) {
        throw Error(PYFLY_STATUS_INVALID, "a trial needs a multiple of 64 outputs");
    }
}

} // namespace

pyfly_status pyfly_kernels_try(int32_t type, int64_t n_out, int32_t n_rows, int32_t n_threads, int32_t n_repeats,
                               int32_t is_ours, pyfly_kernels_trial * out, pyfly_error * error) {
    return guard(error, [&] {
        require_product(type, n_out);
        const pyfly::KernelTrial trial = pyfly::try_product(static_cast<pyfly::kernels::WeightType>(type), n_out,
                                                            trial_setup(n_rows, n_threads, n_repeats, is_ours));
        *out = {trial.error, trial.us};
    });
}

pyfly_status pyfly_kernels_try_attention(int64_t n_cells, int32_t n_rows, int32_t n_threads, int32_t n_repeats,
                                         int32_t is_ours, pyfly_kernels_trial * out, pyfly_error * error) {
    return guard(error, [&] {
        if (n_cells < n_rows) {
            throw Error(PYFLY_STATUS_INVALID, "a trial needs a cell for each row");
        }
        const pyfly::KernelTrial trial =
            pyfly::try_attention(n_cells, trial_setup(n_rows, n_threads, n_repeats, is_ours));
        *out = {trial.error, trial.us};
    });
}

pyfly_status pyfly_kernels_compare(int32_t type, int64_t n_out, int32_t n_threads, int32_t is_ours, uint32_t * out,
                                   pyfly_error * error) {
    return guard(error, [&] {
        require_product(type, n_out);
        const pyfly::TrialSetup setup = trial_setup(1, n_threads, 1, is_ours);
        *out = pyfly::batches_with_other_bits(static_cast<pyfly::kernels::WeightType>(type), n_out, setup.n_threads,
                                              setup.is_ours);
    });
}

pyfly_status pyfly_context_products(void * llama_context_pointer, char * out, size_t size, pyfly_error * error) {
    return guard(error, [&] {
        std::string lines;
        for (const pyfly::GraphProduct & one :
             pyfly::graph_products(static_cast<llama_context *>(llama_context_pointer))) {
            lines += one.op + '\t' + one.weights + '\t' + ggml_type_name(one.type) + '\t' +
                     std::to_string(static_cast<int>(one.type)) + '\t' + std::to_string(one.n) + '\t' +
                     (one.is_ours ? '1' : '0') + '\n';
        }
        std::snprintf(out, size, "%s", lines.c_str());
    });
}

} // extern "C"
