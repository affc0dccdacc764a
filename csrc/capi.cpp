// pyfly.h over the core: arguments are checked, handles unwrapped, exceptions turned into a status. capi_llama.cpp has
// the functions that need llama.cpp, so that the pure part links and is tested without it.

#include <algorithm>
#include <memory>
#include <optional>
#include <string>

#include "batch.h"
#include "guard.h"
#include "measuring.h"
#include "rows.h"
#include "sampler.h"
#include "scripted_model.h"
#include "stop.h"
#include "target.h"
#include "verify.h"

using pyfly::Error;
using pyfly::guard;

struct pyfly_batch {
    pyfly::Batch impl;
};

namespace {

void require_tokens(const int32_t * tokens, size_t n, size_t n_vocab, const char * what) {
    for (size_t i = 0; i < n; i++) {
        if (tokens[i] < 0 || static_cast<size_t>(tokens[i]) >= n_vocab) {
            throw Error(PYFLY_STATUS_INVALID, std::string(what) + " " + std::to_string(tokens[i]) +
                                                  " is outside the vocabulary of " + std::to_string(n_vocab));
        }
    }
}

void mark(pyfly::Vocabulary & vocabulary, const int32_t * protected_tokens, size_t n_protected,
          const int32_t * eog_tokens, size_t n_eog) {
    const size_t n_vocab = static_cast<size_t>(vocabulary.n());
    require_tokens(protected_tokens, n_protected, n_vocab, "protected token");
    require_tokens(eog_tokens, n_eog, n_vocab, "end token");
    for (size_t i = 0; i < n_protected; i++) {
        vocabulary.protect(protected_tokens[i]);
    }
    for (size_t i = 0; i < n_eog; i++) {
        vocabulary.mark_eog(eog_tokens[i]);
    }
}

void require_slot(const pyfly_batch * batch, int32_t slot) {
    if (slot < 0 || slot >= batch->impl.n_slots()) {
        throw Error(PYFLY_STATUS_INVALID, "slot " + std::to_string(slot) + " is outside the batch's " +
                                              std::to_string(batch->impl.n_slots()));
    }
}

} // namespace

extern "C" {

int32_t pyfly_abi_version(void) {
    return 12;
}

const char * pyfly_llama_cpp_python_version(void) {
    return PYFLY_LLAMA_CPP_PYTHON_VERSION;
}

const char * pyfly_llama_headers(void) {
    return PYFLY_LLAMA_HEADERS;
}

void pyfly_set_stop(pyfly_stop_callback stop) {
    pyfly::set_stop(stop);
}

const char * pyfly_simd_level(void) {
    return pyfly::simd_level();
}

pyfly_status pyfly_verify(const float * logits, size_t n_vocab, const int32_t * draft, size_t n_draft,
                          const float * draft_logits, const int32_t * target_tokens, const pyfly_gate_node * gate,
                          size_t n_gate, const pyfly_window_config * window, const int32_t * protected_tokens,
                          size_t n_protected, const int32_t * eog_tokens, size_t n_eog, const int32_t * answered,
                          int64_t n_answered, uint64_t seed, pyfly_decision * decisions, int32_t * tokens,
                          size_t * n_tokens, pyfly_error * error) {
    return guard(error, [&] {
        if (n_vocab < 1) {
            throw Error(PYFLY_STATUS_INVALID, "the logits rows are empty");
        }
        require_tokens(draft, n_draft, n_vocab, "draft token");
        if (target_tokens != nullptr) {
            require_tokens(target_tokens, n_draft + 1, n_vocab, "target token");
        }
        pyfly::Vocabulary vocabulary(static_cast<int32_t>(n_vocab));
        mark(vocabulary, protected_tokens, n_protected, eog_tokens, n_eog);
        if (n_answered < 0) {
            throw Error(PYFLY_STATUS_INVALID, "n_answered must be >= 0");
        }
        if (answered != nullptr) {
            require_tokens(answered, static_cast<size_t>(n_answered), n_vocab, "answered token");
        }
        const pyfly::Verified verified =
            pyfly::verify_step(logits, vocabulary, draft, n_draft, draft_logits, target_tokens,
                               pyfly::GateExpression(gate, n_gate), *window, answered, n_answered, seed);
        std::copy(verified.decisions.begin(), verified.decisions.end(), decisions);
        std::copy(verified.tokens.begin(), verified.tokens.end(), tokens);
        *n_tokens = verified.tokens.size();
    });
}

pyfly_status pyfly_target_scripted_new(const pyfly_scripted_config * config, pyfly_row_callback row, void * user,
                                       pyfly_target ** out, pyfly_error * error) {
    return guard(error, [&] {
        auto model = std::make_unique<pyfly::ScriptedModel>(*config, row, user);
        *out = new pyfly_target{std::move(model), pyfly::Vocabulary(config->n_vocab)};
        if (config->pieces != nullptr) {
            const pyfly::Vocabulary & vocabulary = (*out)->vocabulary;
            std::vector<std::string> pieces(config->pieces, config->pieces + config->n_vocab);
            (*out)->vocabulary.set_pieces([pieces = std::move(pieces), &vocabulary](int32_t token) {
                return pyfly::Piece{pieces[static_cast<size_t>(token)], vocabulary.is_protected(token)};
            });
        }
    });
}

void pyfly_target_free(pyfly_target * target) {
    delete target;
}

pyfly_status pyfly_target_protect(pyfly_target * target, const int32_t * protected_tokens, size_t n_protected,
                                  const int32_t * eog_tokens, size_t n_eog, pyfly_error * error) {
    return guard(error, [&] { mark(target->vocabulary, protected_tokens, n_protected, eog_tokens, n_eog); });
}

pyfly_status pyfly_target_protect_texts(pyfly_target * target, const char * const * texts, size_t n_texts,
                                        pyfly_error * error) {
    return guard(error, [&] {
        std::vector<std::string> markers(texts, texts + n_texts);
        if (std::any_of(markers.begin(), markers.end(), [](const std::string & text) { return text.empty(); })) {
            throw Error(PYFLY_STATUS_INVALID, "a protected text is empty");
        }
        target->vocabulary.set_markers(std::move(markers));
    });
}

size_t pyfly_target_protected(const pyfly_target * target, int32_t * out, size_t capacity) {
    size_t n = 0;
    for (int32_t token = 0; token < target->vocabulary.n(); token++) {
        if (target->vocabulary.is_protected(token)) {
            if (n < capacity) {
                out[n] = token;
            }
            n++;
        }
    }
    return n;
}

int32_t pyfly_target_can_rewind(const pyfly_target * target) {
    return target->model->can_rewind() ? 1 : 0;
}

int32_t pyfly_target_n_sequences(const pyfly_target * target) {
    return target->model->n_sequences();
}

void pyfly_drafter_free(pyfly_drafter * drafter) {
    delete drafter;
}

pyfly_status pyfly_drafter_propose(pyfly_drafter * drafter, const int32_t * history, size_t n_history, int32_t n_max,
                                   int32_t * out, int32_t * n_out, pyfly_error * error) {
    return guard(error, [&] {
        pyfly::Proposal proposal;
        if (n_history > 0 && n_max > 0) {
            const std::vector<int32_t> text(history, history + n_history);
            drafter->impl->propose({{0, &text, n_max, &proposal}});
        }
        std::copy(proposal.tokens.begin(), proposal.tokens.end(), out);
        *n_out = static_cast<int32_t>(proposal.tokens.size());
    });
}

int64_t pyfly_drafter_n_evaluated(const pyfly_drafter * drafter) {
    return drafter->impl->n_evaluated();
}

pyfly_status pyfly_batch_new(pyfly_target * target, pyfly_batch ** out, pyfly_error * error) {
    return guard(error, [&] { *out = new pyfly_batch{pyfly::Batch(*target->model, target->vocabulary)}; });
}

void pyfly_batch_free(pyfly_batch * batch) {
    delete batch;
}

pyfly_status pyfly_batch_configure(pyfly_batch * batch, const pyfly_batch_config * config,
                                   const pyfly_batch_drafter * drafters, size_t n_drafters, pyfly_error * error) {
    return guard(error, [&] {
        std::vector<pyfly::BatchDrafter> list;
        for (size_t i = 0; i < n_drafters; i++) {
            list.push_back({drafters[i].drafter->impl.get(), drafters[i].draft_max});
        }
        batch->impl.configure(config->adaptive != 0, std::move(list), config->n_chunk, config->us_chunk);
    });
}

pyfly_status pyfly_batch_measure(pyfly_batch * batch, pyfly_costs * out, pyfly_error * error) {
    return guard(error, [&] {
        const pyfly::MeasuredCosts costs = pyfly::measure(batch->impl);
        *out = {};
        for (const auto & rows : costs.target) {
            out->rows[out->n_rows++] = {rows.n, rows.us};
        }
        for (const auto & draft : costs.drafts) {
            out->drafts[out->n_drafts++] = {draft.drafter, draft.n_requests, draft.k, draft.us};
        }
        for (const auto & catch_up : costs.catch_up) {
            out->catch_up_us[catch_up.drafter] = catch_up.us;
        }
        out->change_us = costs.change_us;
    });
}

pyfly_status pyfly_batch_expect(pyfly_batch * batch, const pyfly_costs * costs, pyfly_error * error) {
    return guard(error, [&] {
        if (costs->n_rows > PYFLY_MAX_COST_ROWS || costs->n_drafts > PYFLY_MAX_COST_DRAFTS) {
            throw Error(PYFLY_STATUS_INVALID, "there are more costs than pyfly_costs holds");
        }
        pyfly::MeasuredCosts expected;
        for (size_t i = 0; i < costs->n_rows; i++) {
            expected.target.push_back({costs->rows[i].n, costs->rows[i].us});
        }
        for (size_t i = 0; i < costs->n_drafts; i++) {
            const pyfly_cost_draft & draft = costs->drafts[i];
            expected.drafts.push_back({draft.drafter, draft.n_requests, draft.k, draft.us});
        }
        for (int32_t drafter = 0; drafter < PYFLY_MAX_DRAFTERS; drafter++) {
            if (costs->catch_up_us[drafter] != 0.0) {
                expected.catch_up.push_back({drafter, costs->catch_up_us[drafter]});
            }
        }
        expected.change_us = costs->change_us;
        batch->impl.expect_costs(expected);
    });
}

int32_t pyfly_batch_find_slot(const pyfly_batch * batch, const int32_t * history, size_t n_history, int32_t owner) {
    return batch->impl.find_slot(history, n_history, owner);
}

pyfly_status pyfly_batch_begin(pyfly_batch * batch, int32_t slot, const pyfly_request * request, pyfly_error * error) {
    return guard(error, [&] {
        require_slot(batch, slot);
        const bool is_known = request->n_evaluated < 0;
        pyfly::GateExpression gate(request->gate, request->n_gate);
        std::unique_ptr<pyfly::Sampler> sampler = pyfly::make_sampler(
            request->sampler_chain, pyfly::Judge::keeps_shaped_rows(gate, request->settings.trace != 0), gate.draws());
        pyfly::RequestConfig config = {request->settings, std::move(gate), batch->impl.draft_max(request->draft_max)};
        batch->impl.begin(slot, std::move(config),
                          std::vector<int32_t>(request->history, request->history + request->n_history),
                          is_known ? std::nullopt : std::optional<size_t>(static_cast<size_t>(request->n_evaluated)),
                          std::move(sampler));
    });
}

pyfly_status pyfly_batch_resume(pyfly_batch * batch, int32_t slot, size_t n_keep, const int32_t * tokens,
                                size_t n_tokens, pyfly_error * error) {
    return guard(error, [&] {
        require_slot(batch, slot);
        batch->impl.resume(slot, n_keep, tokens, n_tokens);
    });
}

pyfly_status pyfly_batch_want(pyfly_batch * batch, int32_t slot, int32_t n_room, pyfly_error * error) {
    return guard(error, [&] {
        require_slot(batch, slot);
        batch->impl.want(slot, n_room);
    });
}

pyfly_status pyfly_batch_n_left(const pyfly_batch * batch, int32_t slot, size_t * n_left, pyfly_error * error) {
    return guard(error, [&] {
        require_slot(batch, slot);
        *n_left = batch->impl.n_left(slot);
    });
}

pyfly_status pyfly_batch_step(pyfly_batch * batch, pyfly_progress * progress, size_t * n_progress,
                              pyfly_error * error) {
    return guard(error, [&] {
        size_t n = 0;
        for (const pyfly::Batch::Progress & p : batch->impl.step()) {
            const size_t n_records = batch->impl.at(p.slot).transcript().records().size();
            progress[n++] = {p.slot, p.failure.status, p.is_waiting ? 1 : 0, p.is_step ? 1 : 0, n_records};
        }
        *n_progress = n;
    });
}

pyfly_status pyfly_batch_failure(const pyfly_batch * batch, int32_t slot, pyfly_error * error) {
    const pyfly::Failure & failure = batch->impl.failure(slot);
    return failure.status == PYFLY_OK ? PYFLY_OK : pyfly::report(error, failure.status, failure.message.c_str());
}

const float * pyfly_batch_prompt_row(const pyfly_batch * batch, int32_t slot, int32_t position) {
    try {
        return batch->impl.at(slot).prompt_row(position);
    } catch (const std::exception &) {
        return nullptr; // the target did not keep it
    }
}

const pyfly_record * pyfly_batch_records(const pyfly_batch * batch, int32_t slot, size_t * n_records) {
    const std::vector<pyfly_record> & records = batch->impl.at(slot).transcript().records();
    *n_records = records.size();
    return records.data();
}

const int32_t * pyfly_batch_rejected(const pyfly_batch * batch, int32_t slot) {
    return batch->impl.at(slot).transcript().rejected().data();
}

const float * pyfly_batch_record_row(const pyfly_batch * batch, int32_t slot, size_t i) {
    return batch->impl.at(slot).transcript().row(i);
}

size_t pyfly_batch_n_kept(pyfly_batch * batch, int32_t slot, const int32_t * tokens, size_t n) {
    batch->impl.memory(slot).forget_other_checkpoints(tokens, n);
    return batch->impl.memory(slot).kept().size();
}

const uint8_t * pyfly_batch_kept(pyfly_batch * batch, int32_t slot, size_t i, int32_t * n, size_t * n_bytes) {
    const pyfly::Checkpoints::Checkpoint kept = batch->impl.memory(slot).kept()[i];
    *n = kept.n;
    *n_bytes = kept.state->size();
    return kept.state->data();
}

pyfly_status pyfly_batch_restore_kept(pyfly_batch * batch, int32_t slot, const int32_t * tokens, size_t n,
                                      const uint8_t * state, size_t n_bytes, pyfly_error * error) {
    return guard(error, [&] {
        require_slot(batch, slot);
        batch->impl.require_idle();
        if (n < 1 || n_bytes < 1) {
            throw Error(PYFLY_STATUS_INVALID, "a state that was kept has at least one token and one byte");
        }
        batch->impl.memory(slot).restore_checkpoint(
            tokens, n, std::make_shared<const std::vector<uint8_t>>(state, state + n_bytes));
    });
}

const int32_t * pyfly_batch_history(const pyfly_batch * batch, int32_t slot, size_t * n_history) {
    const std::vector<int32_t> & history = batch->impl.at(slot).transcript().history();
    *n_history = history.size();
    return history.data();
}

size_t pyfly_batch_n_evaluated(const pyfly_batch * batch, int32_t slot) {
    return batch->impl.at(slot).memory().n();
}

pyfly_status pyfly_batch_park(pyfly_batch * batch, int32_t slot, size_t n_keep, pyfly_error * error) {
    return guard(error, [&] {
        require_slot(batch, slot);
        batch->impl.park(slot, n_keep);
    });
}

pyfly_status pyfly_batch_end(pyfly_batch * batch, int32_t slot, int64_t n_keep, pyfly_error * error) {
    return guard(error, [&] {
        require_slot(batch, slot);
        batch->impl.end(slot, n_keep < 0 ? pyfly::Sequence::everything : static_cast<size_t>(n_keep));
    });
}

void pyfly_batch_stats(const pyfly_batch * batch, int32_t slot, pyfly_stats * out) {
    *out = batch->impl.at(slot).stats();
}

void pyfly_batch_reset_stats(pyfly_batch * batch, int32_t slot) {
    batch->impl.reset_stats(slot);
}

void pyfly_batch_governor(const pyfly_batch * batch, pyfly_governor_state * out) {
    *out = {};
    if (batch->impl.governor() != nullptr) {
        batch->impl.governor()->state(*out);
    }
}

} // extern "C"
