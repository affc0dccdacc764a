#include "draft_model.h"

#include <algorithm>

#include "error.h"
#include "model_file.h"

namespace pyfly {

namespace {

ModelPointer load_checked(const LlamaTarget & target, const pyfly_draft_model_config & config) {
    ModelFile(config.model_path ? config.model_path : "").require_model();
    return load_draft(target, config, "draft model", false);
}

} // namespace

DraftModel::DraftModel(const LlamaTarget & target, const pyfly_draft_model_config & config)
    : p_min_(require_p_min(config.p_min)), threads_(followed_pool(target, config)),
      model_(load_checked(target, config)),
      context_(make_draft_context(target, model_.get(), draft_context_params(target, config), "draft model")) {
    n_vocab_ = llama_vocab_n_tokens(llama_model_get_vocab(model_.get()));
    n_ctx_ = llama_n_ctx_seq(context_.get());
    n_batch_ = llama_n_batch(context_.get());
    if (n_ctx_ < 16) {
        throw Error(PYFLY_STATUS_INVALID, "the draft's context must hold at least 16 tokens");
    }
    can_shift_ = llama_memory_can_shift(llama_get_memory(context_.get()));
    can_rewind_ = !is_recurrent(model_.get());
    expected_cost_ = static_cast<double>(llama_model_size(model_.get())) /
                     static_cast<double>(llama_model_size(llama_get_model(target.context())));
    warm_up();
}

// Evaluates a token and forgets it. The weights of a file that is mapped are read when they are first used; the
// output's are not used by prompts, so they would make the first draft slow.
void DraftModel::warm_up() {
    const int32_t token = 0;
    evaluate(&token, 1, true);
    forget_all();
    n_evaluated_ = 0;
}

void DraftModel::forget_all() {
    llama_memory_clear(llama_get_memory(context_.get()), false);
    cached_.clear();
}

void DraftModel::forget_from(size_t n) {
    if (n >= cached_.size()) {
        return;
    }
    if (!can_rewind_ || !llama_memory_seq_rm(llama_get_memory(context_.get()), 0, static_cast<llama_pos>(n), -1)) {
        forget_all(); // a state that cannot be taken back is built anew
        return;
    }
    cached_.resize(n);
}

// How much of cached_ is history[offset_...], short of the last token, whose row starts the draft.
size_t DraftModel::n_common(const std::vector<int32_t> & history) const {
    if (offset_ >= history.size()) {
        return 0;
    }
    const size_t n = std::min(cached_.size(), history.size() - offset_ - 1);
    const auto begin = history.begin() + static_cast<std::ptrdiff_t>(offset_);
    return static_cast<size_t>(std::mismatch(begin, begin + static_cast<std::ptrdiff_t>(n), cached_.begin()).first -
                               begin);
}

// Makes cached_ a prefix of history[offset_...].
void DraftModel::sync(const std::vector<int32_t> & history) {
    forget_from(n_common(history));
    if (cached_.empty()) {
        offset_ = 0;
    }
}

// Moves the window so that `n_new` more tokens fit behind what is cached.
void DraftModel::make_room(size_t n_history, size_t n_new) {
    if (cached_.size() + n_new <= n_ctx_) {
        return;
    }
    const size_t keep = n_ctx_ / 2;
    const llama_memory_t memory = llama_get_memory(context_.get());
    if (can_shift_ && can_rewind_ && n_new <= keep && cached_.size() > keep) {
        const size_t drop = cached_.size() - keep;
        llama_memory_seq_rm(memory, 0, 0, static_cast<llama_pos>(drop));
        llama_memory_seq_add(memory, 0, static_cast<llama_pos>(drop), -1, -static_cast<llama_pos>(drop));
        cached_.erase(cached_.begin(), cached_.begin() + static_cast<std::ptrdiff_t>(drop));
        offset_ += drop;
    } else {
        // Too far behind, or a cache that cannot shift: start again with the most recent half.
        forget_all();
        offset_ = n_history > keep ? n_history - keep : 0;
    }
}

void DraftModel::evaluate(const int32_t * tokens, size_t n, bool with_row) {
    try {
        decode_tokens(context_.get(), threads_, "draft model", tokens, n, static_cast<int32_t>(cached_.size()),
                      with_row ? n - 1 : n);
    } catch (...) {
        forget_all(); // the memory may have lost more than this batch
        throw;
    }
    cached_.insert(cached_.end(), tokens, tokens + n);
    n_evaluated_ += static_cast<int64_t>(n);
}

size_t DraftModel::n_behind(const std::vector<int32_t> & history) const {
    const size_t common = n_common(history);
    const size_t n_followed = common > 0 ? offset_ + common : 0;
    const size_t behind = history.size() - 1 - n_followed;
    return behind > 1 ? behind : 0; // a single token goes with the last one
}

// Everything but the last token, whose row starts the draft.
size_t DraftModel::prepare(const std::vector<int32_t> & history) {
    return catch_up(history, 0);
}

// One batch of it, where the memory is to hold n_more tokens behind the last one.
size_t DraftModel::catch_up(const std::vector<int32_t> & history, size_t n_more) {
    sync(history);
    const auto behind = [&] { return history.size() - 1 - offset_ - cached_.size(); };
    make_room(history.size(), behind() + 1 + n_more);
    const size_t n = std::min(behind(), n_batch_);
    if (n > 1) { // a single one goes with the last token, as after a fully accepted draft
        evaluate(history.data() + offset_ + cached_.size(), n, false);
    }
    return behind() > 1 ? behind() : 0;
}

void DraftModel::draft(const std::vector<int32_t> & history, int32_t n_max, std::vector<int32_t> & out) {
    n_max = std::min(n_max, static_cast<int32_t>(n_ctx_ / 4));
    while (catch_up(history, static_cast<size_t>(n_max) - 1) > 0) { // the last draft is not evaluated
    }
    const int32_t * next = history.data() + offset_ + cached_.size();
    size_t n_next = history.size() - offset_ - cached_.size();
    out.reserve(static_cast<size_t>(n_max)); // `next` points into it
    while (static_cast<int32_t>(out.size()) < n_max) {
        evaluate(next, n_next, true);
        const float * row = llama_get_logits_ith(context_.get(), static_cast<int32_t>(n_next) - 1);
        const std::optional<int32_t> token = draft_token(row, static_cast<size_t>(n_vocab_), p_min_, "draft model");
        if (!token) {
            return;
        }
        out.push_back(*token);
        next = &out.back();
        n_next = 1;
    }
}

} // namespace pyfly
