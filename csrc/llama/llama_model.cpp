#include "llama_model.h"

#include <algorithm>

#include "error.h"
#include "sequence_trial.h"
#include "stop.h"

namespace pyfly {

namespace {

// Of kept checkpoints: at most so many of a sequence, and of all together at most this part of the weights' size. A
// state of Qwen3.5-4B has 50 MB, its weights in Q4_K_M 2.5 GB: twelve.
constexpr size_t n_checkpoints = 16, share_of_checkpoints = 4;

// Tokens without rows from which on a batch is interrupted. 64 of a 7B take 2 s on two cores; a step is not lost for
// less.
constexpr size_t worth_interrupting = 64;

} // namespace

bool is_recurrent(const llama_model * model) {
    return llama_model_is_recurrent(model) || llama_model_is_hybrid(model);
}

std::string model_architecture(const llama_model * model) {
    char name[128] = "";
    llama_model_meta_val_str(model, "general.architecture", name, sizeof(name));
    return name;
}

LlamaModel::LlamaModel(llama_context * context, ThreadPool * threads, std::string name, bool is_recurrent,
                       size_t input_width, bool inputs_replace)
    : context_(context), threads_(threads), name_(std::move(name)), is_recurrent_(is_recurrent),
      input_width_(input_width), inputs_replace_(inputs_replace),
      n_batch_(static_cast<int32_t>(llama_n_batch(context))),
      n_snapshots_(static_cast<int32_t>(llama_n_rs_seq(context))) {
    const llama_model * model = llama_get_model(context);
    n_vocab_ = llama_vocab_n_tokens(llama_model_get_vocab(model));
    n_swa_ = llama_model_n_swa(model);
    const llama_rope_type rope = llama_model_rope_type(model);
    n_positions_ = rope == LLAMA_ROPE_TYPE_MROPE || rope == LLAMA_ROPE_TYPE_IMROPE ? 4 : 1;
    if (n_vocab_ < 1 || memory() == nullptr) {
        throw Error(PYFLY_STATUS_INVALID, "this model cannot generate text: it has no vocabulary or no memory");
    }
    sequences_.resize(llama_n_seq_max(context));
    if (n_swa_ > 0 && sequences_.size() > 1) {
        // llama.cpp looks for the cells of all parts of a batch before it evaluates the first one, and what the windows
        // leave behind until the last one is gone then. So a batch is one part. The cells that a sequence's own drafts
        // left behind go to others, too; it does not say which, so snapshots of a recurrent state are no way back (a
        // checkpoint is, it has the cells).
        n_batch_ = std::min(n_batch_, static_cast<int32_t>(n_ubatch()));
        n_snapshots_ = 0;
    }
    if (is_recurrent_) {
        together_ = std::min(find_together(context), n_swa_ > 0 || n_snapshots_ > 0 ? Together::equal : Together::all);
    }
    for (Sequence & sequence : sequences_) {
        if (is_recurrent_) {
            sequence.rewind.emplace(n_snapshots_);
        }
    }
}

void LlamaModel::evaluate(const std::vector<Span> & spans) {
    size_t n = 0;
    for (const Span & span : spans) {
        n += span.n;
    }
    if (n > static_cast<size_t>(n_batch_)) { // llama.cpp ends the process
        throw Error(PYFLY_STATUS_INTERNAL, "the " + name_ + " was given " + std::to_string(n) +
                                               " tokens at once, more than its n_batch of " + std::to_string(n_batch_));
    }
    const std::vector<SpanGroup> groups = group_spans(spans, n_ubatch(), together_);
    const bool moves =
        std::any_of(groups.begin(), groups.end(), [](const SpanGroup & group) { return group.size() > 1; });
    if (is_recurrent_ && moves) {
        for (int32_t s = 0; s < n_sequences(); s++) { // those that are not evaluated too
            at(s).is_lost = !act(s) || at(s).is_lost;
            at(s).rewind->forget_batch();
        }
    }
    for (const Span & span : spans) {
        require_act(span.sequence);
    }
    places_.assign(spans.size(), {});
    for (const SpanGroup & group : groups) {
        decode(spans, group);
        if (&group == &groups.back()) {
            break;
        }
        for (const size_t s : group) {
            const Span & span = spans[s];
            for (size_t i = span.first_row; i < span.n; i++) {
                const float * const from = row(s, i);
                places_[s].rows.insert(places_[s].rows.end(), from, from + n_vocab_);
            }
            keep(s, span.n);
            places_[s].is_kept = true;
        }
    }
}

void LlamaModel::resize_batch(size_t n) {
    tokens_.resize(n);
    positions_.resize(n);
    n_seq_ids_.assign(n, 1);
    ids_.resize(n);
    seq_ids_.resize(n);
    outputs_.resize(n);
    for (size_t i = 0; i < n; i++) {
        seq_ids_[i] = &ids_[i];
    }
}

// Runs llama_decode or llama_encode on a batch, waits for the result and returns its code.
int32_t LlamaModel::compute(const llama_batch & batch, int32_t (*function)(llama_context *, llama_batch)) {
    int32_t code = 0;
    const auto evaluate = [&] {
        code = function(context_, batch);
        llama_synchronize(context_);
    };
    if (threads_ != nullptr) {
        threads_->run(context_, batch.n_tokens, evaluate);
    } else {
        evaluate();
    }
    return code;
}

// llama_decode, which ends early if the caller wants no more: it then gives 2, and `stopped` has the reason. llama.cpp
// asks between the operations of a graph, on this thread, if the backend is the CPU. A callback that somebody else
// has set by llama_set_abort_callback is gone after it: llama.cpp does not tell whether there is one.
int32_t LlamaModel::compute_wanted(const llama_batch & batch, std::optional<Error> & stopped) {
    const auto is_unwanted = [](void * data) {
        try {
            require_wanted();
            return false;
        } catch (const Error & error) {
            static_cast<std::optional<Error> *>(data)->emplace(error);
            return true;
        }
    };
    llama_set_abort_callback(context_, is_unwanted, &stopped);
    const int32_t code = compute(batch, llama_decode);
    llama_set_abort_callback(context_, nullptr, nullptr);
    return code;
}

// Evaluates some of the spans in one batch and waits for the result.
void LlamaModel::decode(const std::vector<Span> & spans, const SpanGroup & group) {
    size_t n = 0;
    for (const size_t s : group) {
        places_[s].begin = n;
        places_[s].first_row = spans[s].first_row;
        n += spans[s].n;
    }
    resize_batch(n);
    inputs_.resize(n * input_width_);
    for (const size_t s : group) {
        const Span & span = spans[s];
        const size_t begin = places_[s].begin;
        // The target's padding, which a draft of a smaller vocabulary lacks: any token does, nobody drafts behind it.
        std::transform(span.tokens, span.tokens + span.n, tokens_.begin() + static_cast<std::ptrdiff_t>(begin),
                       [&](int32_t token) { return token < n_vocab_ ? token : 0; });
        if (span.inputs != nullptr) {
            std::copy_n(span.inputs, span.n * input_width_,
                        inputs_.begin() + static_cast<std::ptrdiff_t>(begin * input_width_));
        }
        for (size_t i = 0; i < span.n; i++) {
            positions_[begin + i] = static_cast<llama_pos>(span.n_past + i);
            ids_[begin + i] = span.sequence;
            outputs_[begin + i] = i >= span.first_row ? 1 : 0;
        }
        if (is_recurrent_) {
            at(span.sequence).rewind->forget_batch(); // should this throw
        }
    }
    const bool has_inputs = input_width_ > 0 && spans[group.front()].inputs != nullptr; // all have, or none
    const bool has_tokens = !has_inputs || !inputs_replace_;
    if (!has_tokens && n_positions_ > 1) { // of a text: three times the same, and one that is not used
        positions_.resize(n * static_cast<size_t>(n_positions_));
        std::copy_n(positions_.begin(), n, positions_.begin() + static_cast<std::ptrdiff_t>(n));
        std::copy_n(positions_.begin(), n, positions_.begin() + static_cast<std::ptrdiff_t>(2 * n));
        std::fill_n(positions_.begin() + static_cast<std::ptrdiff_t>(3 * n), n, 0);
    }
    llama_batch batch = {};
    batch.n_tokens = static_cast<int32_t>(n);
    batch.token = has_tokens ? tokens_.data() : nullptr;
    batch.embd = has_inputs ? inputs_.data() : nullptr;
    batch.pos = positions_.data();
    batch.n_seq_id = n_seq_ids_.data();
    batch.seq_id = seq_ids_.data();
    batch.logits = outputs_.data();
    begin_batch(n);
    std::optional<Error> stopped;
    const bool is_interruptible = spans.size() == 1 && std::min(spans[0].first_row, spans[0].n) >= worth_interrupting;
    const int32_t code = is_interruptible ? compute_wanted(batch, stopped) : compute(batch, llama_decode);
    if (code == 0 && !stopped) {
        for (const size_t s : group) {
            if (is_recurrent_) {
                at(spans[s].sequence).rewind->evaluated(spans[s].n);
            }
        }
        return;
    }
    if (code != 1 && is_recurrent_) {
        // A recurrent state is of no use after half a batch, and cutting it may succeed and be wrong. Before a batch of
        // several sequences llama.cpp moves the states of others too, and the graph, which has not run, copies them.
        for (int32_t s = 0; s < n_sequences(); s++) {
            const bool is_of_batch =
                std::any_of(group.begin(), group.end(), [&](size_t i) { return spans[i].sequence == s; });
            if (is_of_batch || group.size() > 1) {
                at(s).is_lost = at(s).is_lost || (!is_of_batch && n_held(s) > 0);
                at(s).rewind->forget_batch();
                clear(s);
            }
        }
    } else if (code != 1) { // where there was no room llama.cpp has not begun
        for (const size_t s : group) {
            llama_memory_seq_rm(memory(), spans[s].sequence, static_cast<llama_pos>(spans[s].n_past), -1);
        }
    }
    if (stopped) {
        throw *stopped;
    }
    const char * why = code == 1    ? "no room in its KV cache for this batch; raise {n_ctx}"
                       : code == 2  ? "the decode was aborted"
                       : code == -1 ? "the batch was refused"
                                    : "the backend failed";
    throw Error(code == 1 ? PYFLY_STATUS_CONTEXT_FULL : PYFLY_STATUS_NATIVE,
                "llama_decode on the " + name_ + " returned " + std::to_string(code) + ": " + why);
}

void LlamaModel::encode(const float * rows, size_t n) {
    resize_batch(n);
    // The encoder does not use the positions, but llama.cpp wants them to continue from its memory.
    const llama_pos n_past = n_held(0);
    for (size_t i = 0; i < n; i++) {
        positions_[i] = n_past + static_cast<llama_pos>(i);
        ids_[i] = 0;
        outputs_[i] = 1;
    }
    llama_batch batch = {};
    batch.n_tokens = static_cast<int32_t>(n);
    batch.embd = const_cast<float *>(rows); // llama_encode does not write to it
    batch.pos = positions_.data();
    batch.n_seq_id = n_seq_ids_.data();
    batch.seq_id = seq_ids_.data();
    batch.logits = outputs_.data();
    const int32_t code = compute(batch, llama_encode);
    if (code != 0) {
        throw Error(PYFLY_STATUS_NATIVE, "llama_encode on the " + name_ + " returned " + std::to_string(code));
    }
}

const float * LlamaModel::row(size_t span, size_t i) {
    if (span >= places_.size()) {
        throw Error(PYFLY_STATUS_INTERNAL, "the rows of span " + std::to_string(span) + " are gone");
    }
    const Place & place = places_[span];
    if (place.is_kept) {
        return place.rows.data() + (i - place.first_row) * static_cast<size_t>(n_vocab_);
    }
    const float * row = llama_get_logits_ith(context_, batch_index(span, i));
    if (row == nullptr) {
        throw Error(PYFLY_STATUS_INTERNAL,
                    "llama.cpp kept no logits for batch index " + std::to_string(batch_index(span, i)));
    }
    return row;
}

int32_t LlamaModel::n_held(int32_t sequence) const {
    return llama_memory_seq_pos_max(memory(), sequence) + 1;
}

// Positions from 0 on that the cache of the sliding window has dropped (swa_full=False): 0 while it has room.
int32_t LlamaModel::n_pruned(int32_t sequence) const {
    return std::max(0, static_cast<int32_t>(llama_memory_seq_pos_min(memory(), sequence)));
}

// Whether a layer with a sliding window looks, at position n, at one of the first n_pruned positions.
bool LlamaModel::needs(int32_t n, int32_t n_pruned) const {
    return n_swa_ > 0 && n_pruned > std::max(0, n - n_swa_ + 1);
}

// The cache drops the oldest cells it does not need, and only when it is full; it has room for the windows and a batch.
bool LlamaModel::can_return(int32_t sequence, int32_t n, int32_t n_more) const {
    if (is_recurrent_) {
        return has_checkpoints_;
    }
    if (n_swa_ == 0) {
        return true;
    }
    int64_t n_all = n_more; // a cache may be common to all
    for (int32_t s = 0; s < n_sequences(); s++) {
        n_all += n_held(s);
    }
    const int32_t n_now = n_pruned(sequence);
    const bool is_full = n_now > 0 || n_all > n_swa_ + static_cast<int64_t>(n_ubatch());
    return !needs(n, is_full ? n_now + n_more : 0);
}

void LlamaModel::clear(int32_t sequence) {
    llama_memory_seq_rm(memory(), sequence, -1, -1); // a whole sequence can be removed from every kind of memory
    at(sequence).is_shared = false;
}

int32_t LlamaModel::truncate(int32_t sequence, int32_t n) {
    const int32_t n_now = n_held(sequence);
    if (is_recurrent_) {
        at(sequence).is_lost = false; // the caller learns what is left
        return at(sequence).rewind->truncate(n_now, n);
    }
    if (n == 0 || needs(std::min(n, n_now), n_pruned(sequence))) {
        // llama.cpp would cut its cache all the same (as it does when a batch fails) and go on with what is missing.
        clear(sequence);
        return 0;
    }
    if (n >= n_now) {
        return n_now;
    }
    if (!llama_memory_seq_rm(memory(), sequence, n, -1)) {
        throw Error(PYFLY_STATUS_NATIVE,
                    "the " + name_ + "'s memory could not be rolled back to position " + std::to_string(n));
    }
    return n;
}

// The recurrent part is replaced; what the attention part of a hybrid memory holds behind it is cut off.
bool LlamaModel::restore(int32_t sequence, int32_t n, const std::vector<uint8_t> & state) {
    return llama_state_seq_set_data_ext(context_, state.data(), state.size(), sequence,
                                        LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == state.size() &&
           llama_memory_seq_rm(memory(), sequence, n, -1);
}

// Carries out what truncate() planned. Where that fails the sequence is empty.
bool LlamaModel::act(int32_t sequence) {
    const Rewind::Plan plan = at(sequence).rewind->take();
    bool is_done = true;
    switch (plan.way) {
        case Rewind::Way::stay:
            break;
        case Rewind::Way::snapshot:
            is_done = llama_memory_seq_rm(memory(), sequence, plan.n, -1);
            break;
        case Rewind::Way::checkpoint:
            is_done = restore(sequence, plan.n, *plan.state);
            break;
        case Rewind::Way::clear:
            clear(sequence);
            break;
    }
    if (!is_done) {
        clear(sequence);
    }
    return is_done;
}

void LlamaModel::require_act(int32_t sequence) {
    if (!is_recurrent_) {
        return;
    }
    const bool is_done = act(sequence) && !at(sequence).is_lost;
    at(sequence).is_lost = false;
    if (!is_done) {
        throw Error(PYFLY_STATUS_NATIVE,
                    "the " + name_ + "'s recurrent state could not be rolled back; decode without a drafter");
    }
}

bool LlamaModel::checkpoint(int32_t sequence, bool is_kept) {
    if (!is_recurrent_) {
        return true;
    }
    Rewind & rewind = *at(sequence).rewind;
    const int32_t n = rewind.n_left(n_held(sequence));
    if (rewind.checkpoints().has(n)) {
        if (!is_kept) {
            return true;
        }
        rewind.checkpoints().keep(n);
    } else if (!has_checkpoints_) {
        return false;
    } else {
        require_act(sequence);
        const auto state = rewind.checkpoints().take_buffer();
        state->resize(llama_state_seq_get_size_ext(context_, sequence, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY));
        const size_t n_written = llama_state_seq_get_data_ext(context_, state->data(), state->size(), sequence,
                                                              LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
        has_checkpoints_ = n_written > 0 && n_written == state->size();
        if (!has_checkpoints_) {
            return false;
        }
        rewind.checkpoints().add(n, state, is_kept);
    }
    if (is_kept) {
        std::vector<Checkpoints *> all;
        for (int32_t s = 0; s < n_sequences(); s++) {
            all.push_back(checkpoints(s));
        }
        bound(all, static_cast<size_t>(sequence), n, n_checkpoints,
              llama_model_size(llama_get_model(context_)) / share_of_checkpoints);
    }
    return true;
}

Checkpoints * LlamaModel::checkpoints(int32_t sequence) {
    return is_recurrent_ ? &at(sequence).rewind->checkpoints() : nullptr;
}

void LlamaModel::settle(int32_t sequence) {
    if (is_recurrent_) {
        require_act(sequence);
        at(sequence).rewind->forget_batch();
    }
}

bool LlamaModel::copy(int32_t from, int32_t to, int32_t n) {
    if (!can_copy() || n < 1 || n != n_copyable(from, n) || n_held(from) < n) {
        return false;
    }
    // The whole, then a cut: caches with a stream for each sequence can do no other.
    llama_memory_seq_cp(memory(), from, to, -1, -1);
    if (is_recurrent_) {
        const Checkpoints::State state = checkpoints(from)->longest(n)->state;
        if (!restore(to, n, *state)) {
            clear(to);
            return false;
        }
        checkpoints(to)->share(*checkpoints(from), n);
        at(to).rewind->forget_batch();
    } else if (n < n_held(to) && !llama_memory_seq_rm(memory(), to, n, -1)) {
        clear(to);
        return false;
    }
    at(from).is_shared = at(to).is_shared = true;
    return true;
}

bool LlamaModel::shift(int32_t sequence, int32_t n) {
    if (is_recurrent_ || at(sequence).is_shared || !llama_memory_can_shift(memory())) {
        return false;
    }
    llama_memory_seq_rm(memory(), sequence, 0, n);
    llama_memory_seq_add(memory(), sequence, n, -1, -n);
    return true;
}

} // namespace pyfly
