#include "llama_target.h"

#include <algorithm>
#include <cstring>

#include "error.h"
#include "release_llama.h"
#include "target.h"

namespace pyfly {

namespace {

Piece read_piece(const llama_vocab * vocab, int32_t token) {
    Piece piece = {std::string(64, '\0'), llama_vocab_is_control(vocab, token) || llama_vocab_is_eog(vocab, token)};
    const auto read = [&] {
        return llama_token_to_piece(vocab, token, piece.text.data(), static_cast<int32_t>(piece.text.size()),
                                    /*lstrip=*/0, /*special=*/true);
    };
    int32_t n = read();
    if (n < 0) { // the text is longer
        piece.text.resize(static_cast<size_t>(-n));
        n = read();
    }
    piece.text.resize(static_cast<size_t>(std::max(n, 0)));
    return piece;
}

} // namespace

// Tokens that only have a meaning to the chat format are control, unknown and unused ones, and user-defined markers
// such as <think> or <tool_call>, which are normal text to the model but appear in its chat template. A model without a
// vocabulary has only the numbers of its tokens; llama.cpp ends the process when asked for more. Texts are read when
// they are asked for: the model outlives its target.
Vocabulary make_vocabulary(const llama_model * model) {
    const llama_vocab * vocab = llama_model_get_vocab(model);
    const int32_t n_vocab = llama_vocab_n_tokens(vocab);
    Vocabulary vocabulary(n_vocab);
    if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {
        return vocabulary;
    }
    vocabulary.set_pieces([vocab](int32_t token) { return read_piece(vocab, token); });
    const char * chat_template = llama_model_chat_template(model, nullptr);
    for (int32_t token = 0; token < n_vocab; token++) {
        const int attributes = llama_vocab_get_attr(vocab, token);
        if (llama_vocab_is_eog(vocab, token)) {
            vocabulary.mark_eog(token);
        } else if (attributes & (LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN | LLAMA_TOKEN_ATTR_UNUSED)) {
            vocabulary.protect(token);
        } else if (attributes & LLAMA_TOKEN_ATTR_USER_DEFINED) {
            const char * text = llama_vocab_get_text(vocab, token);
            const size_t length = std::strlen(text);
            const bool is_marker = length > 2 && text[0] == '<' && text[length - 1] == '>';
            if (is_marker || (chat_template && length > 2 && std::strstr(chat_template, text))) {
                vocabulary.protect(token);
            }
        }
    }
    return vocabulary;
}

LlamaTarget::LlamaTarget(llama_context * context, bool is_adaptive, bool is_batch_adaptive, int32_t n_requests,
                         int32_t n_ctx, LayerTap * tap)
    : LlamaTarget(context,
                  std::make_unique<ThreadPool>(ThreadPool::Size{
                      llama_n_threads(context), llama_n_threads_batch(context), is_adaptive, is_batch_adaptive}),
                  tap) {
    n_ctx_ = std::min(n_ctx, LlamaModel::n_ctx());
    if (n_requests > 0) {
        use_sequences(n_requests);
    }
}

LlamaTarget::LlamaTarget(llama_context * context, std::unique_ptr<ThreadPool> thread_pool, LayerTap * tap)
    : LlamaModel(context, thread_pool.get(), "target", is_recurrent(llama_get_model(context))),
      thread_pool_(std::move(thread_pool)) {
    const llama_model * model = llama_get_model(context);
    tap_ = layer_inputs(model) == LayerInputs::tapped ? tap : nullptr;
    nextn_width_ = static_cast<size_t>(llama_model_n_embd_out(model));
    layer_width_ = static_cast<size_t>(llama_model_n_embd(model));
    thread_pool_->attach(context);
}

void LlamaTarget::keep_nextn(bool is_kept) {
    n_nextn_users_ += is_kept ? 1 : -1;
    llama_set_embeddings_nextn(context(), n_nextn_users_ > 0, /*masked=*/false);
}

void LlamaTarget::keep_layer_input(uint32_t layer, bool is_kept) {
    n_layer_users_[layer] += is_kept ? 1 : -1;
    if (tap_ != nullptr) {
        tap_->keep(layer, n_layer_users_[layer] > 0);
    } else {
        llama_set_embeddings_layer_inp(context(), layer, n_layer_users_[layer] > 0);
    }
}

// A tap sees the rows in the order in which llama.cpp evaluates them, which is a batch's where sequences share cells
// and no window slides.
void LlamaTarget::require_layer_input(int32_t layer) const {
    const llama_model * model = llama_get_model(context());
    const bool is_published = layer_inputs(model) == LayerInputs::published;
    const bool is_in_order = llama_n_seq_max(context()) == 1 ||
                             (llama_n_ctx_seq(context()) == llama_n_ctx(context()) && llama_model_n_swa(model) == 0);
    if (!is_published && (tap_ == nullptr || !is_in_order)) {
        throw Error(PYFLY_STATUS_INCOMPATIBLE, "llama.cpp does not publish the hidden states of architecture " +
                                                   model_architecture(model) + " here; choose another drafter");
    }
    const int32_t n_layer = llama_model_n_layer(model), first = is_published ? 0 : 1;
    if (layer < first || layer >= n_layer) {
        throw Error(PYFLY_STATUS_INCOMPATIBLE, "the input of layer " + std::to_string(layer) +
                                                   " cannot be read; the target has those of layers " +
                                                   std::to_string(first) + " to " + std::to_string(n_layer - 1));
    }
}

void LlamaTarget::begin_batch(size_t n) {
    if (tap_ != nullptr) {
        tap_->begin(n);
    }
}

const float * LlamaTarget::nextn_rows(size_t span, size_t i) const {
    if (place(span).is_kept) {
        const std::vector<float> & kept = hidden_.at(span).nextn;
        return kept.empty() ? nullptr : kept.data() + i * nextn_width_;
    }
    const float * rows = llama_get_embeddings_nextn(context());
    return rows == nullptr ? nullptr : rows + (place(span).begin + i) * nextn_width_;
}

const float * LlamaTarget::layer_input_rows(uint32_t layer, size_t span, size_t i) const {
    if (place(span).is_kept) {
        return hidden_.at(span).layers.at(layer).data() + i * layer_width_;
    }
    const float * rows =
        tap_ == nullptr ? llama_get_embeddings_layer_inp(context(), layer) : tap_->rows(layer, layer_width_);
    if (rows == nullptr) {
        throw Error(PYFLY_STATUS_NATIVE, "llama.cpp's graph of this model does not name the input of layer " +
                                             std::to_string(layer) + "; choose another drafter");
    }
    return rows + (place(span).begin + i) * layer_width_;
}

void LlamaTarget::keep(size_t span, size_t n) {
    Hidden hidden;
    if (const float * rows = n_nextn_users_ > 0 ? nextn_rows(span, 0) : nullptr) {
        hidden.nextn.assign(rows, rows + n * nextn_width_);
    }
    for (const auto & [layer, n_users] : n_layer_users_) {
        if (n_users > 0) {
            const float * rows = layer_input_rows(layer, span, 0);
            hidden.layers[layer].assign(rows, rows + n * layer_width_);
        }
    }
    hidden_[span] = std::move(hidden);
}

LlamaTarget & llama_target(pyfly_target * target) {
    auto * llama = dynamic_cast<LlamaTarget *>(target->model.get());
    if (llama == nullptr) {
        throw Error(PYFLY_STATUS_INVALID, "a drafter with a model of its own needs a llama target");
    }
    return *llama;
}

} // namespace pyfly
