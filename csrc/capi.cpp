// pyfly.h over the core: arguments are checked, handles unwrapped, exceptions turned into a status. capi_llama.cpp has
// the functions that need llama.cpp, so that the pure part links and is tested without it.

#include <algorithm>
#include <string>

#include "drafters/callback_drafter.h"
#include "drafters/prompt_lookup.h"
#include "guard.h"
#include "handles.h"
#include "rows.h"
#include "sampler.h"
#include "scripted_target.h"
#include "verify.h"

using pyfly::Error;
using pyfly::guard;

namespace {

void require_tokens(const int32_t * tokens, size_t n, size_t n_vocab, const char * what) {
    for (size_t i = 0; i < n; i++) {
        if (tokens[i] < 0 || static_cast<size_t>(tokens[i]) >= n_vocab) {
            throw Error(PYFLY_STATUS_INVALID, std::string(what) + " " + std::to_string(tokens[i]) +
                                                  " is outside the vocabulary of " + std::to_string(n_vocab));
        }
    }
}

} // namespace

extern "C" {

int32_t pyfly_abi_version(void) {
    return 1;
}

const char * pyfly_llama_cpp_python_version(void) {
    return PYFLY_LLAMA_CPP_PYTHON_VERSION;
}

const char * pyfly_simd_level(void) {
    return pyfly::simd_level();
}

pyfly_status pyfly_row_statistics(const float * row, size_t n_vocab, int32_t top, pyfly_row_stats * out,
                                  pyfly_error * error) {
    return guard(error, [&] {
        if (n_vocab < 1 || top < 1 || top > pyfly::max_top) {
            throw Error(PYFLY_STATUS_INVALID, "row statistics need at least one logit and a top in 1..32");
        }
        const pyfly::RowStats stats = pyfly::row_stats(row, n_vocab, top);
        if (!stats.max.finite) {
            throw Error(PYFLY_STATUS_NOT_FINITE, "the logits row has no distribution: NaN, +inf, or -inf everywhere");
        }
        *out = {stats.max.token, stats.max.logit, stats.log_sum_exp, stats.entropy, stats.top_entropy(stats.n_top)};
    });
}

int32_t pyfly_row_argmax(const float * row, size_t n_vocab) {
    return n_vocab > 0 ? pyfly::row_max(row, n_vocab).token : -1;
}

pyfly_status pyfly_verify(const float * logits, size_t n_vocab, const int32_t * draft, size_t n_draft,
                          const int32_t * target_tokens, const pyfly_gate_node * gate, size_t n_gate,
                          const pyfly_window_config * window, const int32_t * protected_tokens, size_t n_protected,
                          pyfly_decision * decisions, int32_t * tokens, size_t * n_tokens, pyfly_error * error) {
    return guard(error, [&] {
        if (n_vocab < 1) {
            throw Error(PYFLY_STATUS_INVALID, "the logits rows are empty");
        }
        require_tokens(draft, n_draft, n_vocab, "draft token");
        require_tokens(protected_tokens, n_protected, n_vocab, "protected token");
        if (target_tokens != nullptr) {
            require_tokens(target_tokens, n_draft + 1, n_vocab, "target token");
        }
        std::vector<bool> is_protected(n_vocab, false);
        for (size_t i = 0; i < n_protected; i++) {
            is_protected[static_cast<size_t>(protected_tokens[i])] = true;
        }
        const pyfly::Round round = pyfly::verify_round(logits, n_vocab, draft, n_draft, target_tokens,
                                                       pyfly::Gate(gate, n_gate), *window, is_protected);
        std::copy(round.decisions.begin(), round.decisions.end(), decisions);
        std::copy(round.tokens.begin(), round.tokens.end(), tokens);
        *n_tokens = round.tokens.size();
    });
}

pyfly_status pyfly_target_scripted_new(int32_t n_vocab, int32_t n_ctx, int32_t n_batch, pyfly_row_callback row,
                                       void * user, pyfly_target ** out, pyfly_error * error) {
    return guard(error, [&] {
        *out = new pyfly_target{std::make_unique<pyfly::ScriptedTarget>(n_vocab, n_ctx, n_batch, row, user)};
    });
}

pyfly_status pyfly_target_scripted_limit(pyfly_target * target, int32_t n_snapshots, int32_t has_checkpoints,
                                         pyfly_error * error) {
    return guard(error, [&] {
        auto * scripted = dynamic_cast<pyfly::ScriptedTarget *>(target->impl.get());
        if (scripted == nullptr) {
            throw Error(PYFLY_STATUS_INVALID, "only a scripted target can be limited");
        }
        scripted->limit(n_snapshots, has_checkpoints != 0);
    });
}

void pyfly_target_free(pyfly_target * target) {
    delete target;
}

pyfly_status pyfly_target_protect(pyfly_target * target, const int32_t * protected_tokens, size_t n_protected,
                                  const int32_t * eog_tokens, size_t n_eog, pyfly_error * error) {
    return guard(error, [&] {
        const size_t n_vocab = static_cast<size_t>(target->impl->n_vocab());
        require_tokens(protected_tokens, n_protected, n_vocab, "protected token");
        require_tokens(eog_tokens, n_eog, n_vocab, "end token");
        for (size_t i = 0; i < n_protected; i++) {
            target->impl->protect(protected_tokens[i]);
        }
        for (size_t i = 0; i < n_eog; i++) {
            target->impl->mark_eog(eog_tokens[i]);
        }
    });
}

size_t pyfly_target_protected(const pyfly_target * target, int32_t * out, size_t capacity) {
    size_t n = 0;
    for (int32_t token = 0; token < target->impl->n_vocab(); token++) {
        if (target->impl->is_protected(token)) {
            if (n < capacity) {
                out[n] = token;
            }
            n++;
        }
    }
    return n;
}

int32_t pyfly_target_can_rewind(const pyfly_target * target) {
    return target->impl->can_rewind() ? 1 : 0;
}

pyfly_status pyfly_drafter_lookup_new(int32_t max_ngram, int32_t min_ngram, int32_t num_pred, int32_t match,
                                      pyfly_drafter ** out, pyfly_error * error) {
    return guard(error, [&] {
        *out = new pyfly_drafter{std::make_unique<pyfly::PromptLookup>(max_ngram, min_ngram, num_pred,
                                                                       static_cast<pyfly_lookup_match>(match))};
    });
}

pyfly_status pyfly_drafter_callback_new(pyfly_draft_callback draft, void * user, pyfly_drafter ** out,
                                        pyfly_error * error) {
    return guard(error, [&] { *out = new pyfly_drafter{std::make_unique<pyfly::CallbackDrafter>(draft, user)}; });
}

void pyfly_drafter_free(pyfly_drafter * drafter) {
    delete drafter;
}

pyfly_status pyfly_drafter_propose(pyfly_drafter * drafter, const int32_t * history, size_t n_history, int32_t n_max,
                                   int32_t * out, int32_t * n_out, pyfly_error * error) {
    return guard(error, [&] {
        std::vector<int32_t> draft;
        if (n_history > 0 && n_max > 0) {
            drafter->impl->draft(std::vector<int32_t>(history, history + n_history), n_max, draft);
        }
        std::copy(draft.begin(), draft.end(), out);
        *n_out = static_cast<int32_t>(draft.size());
    });
}

int64_t pyfly_drafter_n_evaluated(const pyfly_drafter * drafter) {
    return drafter->impl->n_evaluated();
}

pyfly_status pyfly_engine_new(pyfly_target * target, pyfly_engine ** out, pyfly_error * error) {
    return guard(error, [&] { *out = new pyfly_engine{pyfly::Engine(*target->impl)}; });
}

void pyfly_engine_free(pyfly_engine * engine) {
    delete engine;
}

pyfly_status pyfly_engine_configure(pyfly_engine * engine, const pyfly_engine_config * config,
                                    const pyfly_engine_drafter * drafters, size_t n_drafters, pyfly_error * error) {
    return guard(error, [&] {
        std::vector<pyfly::EngineDrafter> list;
        for (size_t i = 0; i < n_drafters; i++) {
            list.push_back({drafters[i].drafter->impl.get(), drafters[i].draft_max});
        }
        engine->impl.configure({pyfly::Gate(config->gate, config->n_gate), config->window, config->adaptive != 0,
                                config->trace != 0, config->keep_rows != 0, config->resumable != 0},
                               std::move(list));
    });
}

pyfly_status pyfly_engine_begin(pyfly_engine * engine, const int32_t * history, size_t n_history, size_t n_evaluated,
                                void * sampler_chain, pyfly_error * error) {
    return guard(error, [&] {
        engine->impl.begin(std::vector<int32_t>(history, history + n_history), n_evaluated,
                           pyfly::make_sampler(sampler_chain, engine->impl.keeps_shaped_rows()));
    });
}

pyfly_status pyfly_engine_resume(pyfly_engine * engine, size_t n_keep, const int32_t * tokens, size_t n_tokens,
                                 pyfly_error * error) {
    return guard(error, [&] { engine->impl.resume(n_keep, tokens, n_tokens); });
}

pyfly_status pyfly_engine_prefill(pyfly_engine * engine, int32_t all_rows, size_t * n_left, pyfly_error * error) {
    return guard(error, [&] { *n_left = engine->impl.prefill(all_rows != 0); });
}

const float * pyfly_engine_prompt_row(const pyfly_engine * engine, int32_t position) {
    try {
        return engine->impl.prompt_row(position);
    } catch (...) {
        return nullptr; // the target did not keep it
    }
}

pyfly_status pyfly_engine_round(pyfly_engine * engine, int32_t n_room, size_t * n_records, pyfly_error * error) {
    return guard(error, [&] { *n_records = engine->impl.round(n_room); });
}

const pyfly_record * pyfly_engine_records(const pyfly_engine * engine) {
    return engine->impl.records().data();
}

const int32_t * pyfly_engine_rejected(const pyfly_engine * engine) {
    return engine->impl.rejected().data();
}

const float * pyfly_engine_record_row(const pyfly_engine * engine, size_t i) {
    return engine->impl.record_row(i);
}

const int32_t * pyfly_engine_history(const pyfly_engine * engine, size_t * n_history) {
    *n_history = engine->impl.history().size();
    return engine->impl.history().data();
}

size_t pyfly_engine_n_evaluated(const pyfly_engine * engine) {
    return engine->impl.n_evaluated();
}

pyfly_status pyfly_engine_park(pyfly_engine * engine, size_t n_keep, pyfly_error * error) {
    return guard(error, [&] { engine->impl.park(n_keep); });
}

pyfly_status pyfly_engine_end(pyfly_engine * engine, size_t n_keep, pyfly_error * error) {
    return guard(error, [&] { engine->impl.end(n_keep); });
}

void pyfly_engine_stats(const pyfly_engine * engine, pyfly_stats * out) {
    *out = engine->impl.stats();
}

void pyfly_engine_reset_stats(pyfly_engine * engine) {
    engine->impl.reset_stats();
}

void pyfly_engine_governor(const pyfly_engine * engine, pyfly_governor_state * out) {
    const pyfly::Governor & governor = engine->impl.governor();
    for (int32_t i = 0; i <= PYFLY_MAX_DEPTH; i++) {
        out->target_us[i] = governor.target_cost(i + 1);
        out->rounds_at[i] = governor.rounds_at(i);
    }
    for (int32_t drafter = 0; drafter < PYFLY_MAX_DRAFTERS; drafter++) {
        out->catch_up_us[drafter] = governor.catch_up_cost(drafter);
        for (int32_t depth = 0; depth < PYFLY_MAX_DEPTH; depth++) {
            out->draft_us[drafter * PYFLY_MAX_DEPTH + depth] = governor.draft_cost(drafter, depth + 1);
            out->acceptance[drafter * PYFLY_MAX_DEPTH + depth] = governor.acceptance(drafter, depth + 1);
        }
    }
}

} // extern "C"
