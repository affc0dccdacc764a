// A llama_context with one or more sequences as a Model: targets (llama_target.h), draft models and heads.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "error.h"
#include "llama.h"
#include "model.h"
#include "rewind.h"
#include "span_groups.h"
#include "thread_pool.h"

namespace pyfly {

class LlamaModel : public Model {
  public:
    // Context and threads are borrowed. `name` is for errors. threads: the pool whose size the context follows; null:
    // it has its own thread count. is_recurrent: its memory holds recurrent states. input_width: floats of Span.inputs,
    // 0 for models that take tokens alone; inputs_replace: llama.cpp is given either the inputs of a batch or its
    // tokens, not both. Throws Error: INVALID for a context without memory or vocabulary.
    LlamaModel(llama_context * context, ThreadPool * threads, std::string name, bool is_recurrent,
               size_t input_width = 0, bool inputs_replace = false);

    int32_t n_vocab() const override { return n_vocab_; }
    int32_t n_ctx() const override { return static_cast<int32_t>(llama_n_ctx_seq(context_)); }
    int32_t n_batch() const override { return n_batch_; }
    bool is_faster_in_a_row() const override { return llama_supports_gpu_offload(); }
    int32_t n_sequences() const override { return static_cast<int32_t>(sequences_.size()); }
    int64_t n_cells() const override { return static_cast<int64_t>(llama_n_ctx(context_)); }
    void evaluate(const std::vector<Span> & spans) override;
    const float * row(size_t span, size_t i) override;
    int32_t truncate(int32_t sequence, int32_t n) override;
    int32_t rewind_depth() const override { return is_recurrent_ ? n_snapshots_ : unlimited; }
    bool checkpoint(int32_t sequence, bool is_kept) override;
    Checkpoints * checkpoints(int32_t sequence) override;
    bool can_checkpoint() const override { return has_checkpoints_; }
    bool can_return(int32_t sequence, int32_t n, int32_t n_more) const override;
    void settle(int32_t sequence) override;

    // Cells of a sliding window that sequences share are never dropped.
    bool can_copy() const override { return (!is_recurrent_ || has_checkpoints_) && n_swa_ == 0; }
    bool copy(int32_t from, int32_t to, int32_t n) override;
    bool shift(int32_t sequence, int32_t n) override;

    // Runs the encoder over rows [n][its input width], 1 <= n <= n_ubatch, and waits for it. They may be of several
    // sequences: it looks at each row alone. Throws Error(PYFLY_STATUS_NATIVE).
    void encode(const float * rows, size_t n);

    llama_context * context() const { return context_; }
    size_t n_ubatch() const { return llama_n_ubatch(context_); }

    // Where a span of the last evaluate() is in the last batch that llama.cpp was given. Not for models with recurrent
    // states.
    int32_t batch_index(size_t span, size_t i) const { return static_cast<int32_t>(places_[span].begin + i); }

  protected:
    // Uses only the first n sequences of the context.
    void use_sequences(int32_t n) { sequences_.resize(std::min(static_cast<size_t>(n), sequences_.size())); }

    // Where the outputs of a span are.
    struct Place {
        size_t begin; // of its tokens in llama.cpp's batch
        size_t first_row;
        bool is_kept;            // the batch was not the last one; its rows are in `rows`
        std::vector<float> rows; // [n - first_row][n_vocab]
    };

    const Place & place(size_t span) const { return places_[span]; }

    // A batch of n tokens is about to be evaluated.
    virtual void begin_batch(size_t n) { (void) n; }

    // Another batch follows in the same evaluate(): what else is wanted of tokens[n] of this span, at place(span).begin
    // of llama.cpp's batch, must be copied now.
    virtual void keep(size_t span, size_t n) { (void) span, (void) n; }

  private:
    struct Sequence {
        std::optional<Rewind> rewind; // for recurrent states
        bool is_lost = false;         // its recurrent state could not be taken back while others were evaluated
        bool is_shared = false;       // it may have cells in common with another one
    };

    Sequence & at(int32_t sequence) { return sequences_[static_cast<size_t>(sequence)]; }
    llama_memory_t memory() const { return llama_get_memory(context_); }
    int32_t n_held(int32_t sequence) const;
    int32_t n_pruned(int32_t sequence) const;
    bool needs(int32_t n, int32_t n_pruned) const;
    void clear(int32_t sequence);
    bool act(int32_t sequence);
    bool restore(int32_t sequence, int32_t n, const std::vector<uint8_t> & state);
    void require_act(int32_t sequence);
    void decode(const std::vector<Span> & spans, const SpanGroup & group);
    void resize_batch(size_t n);
    int32_t compute(const llama_batch & batch, int32_t (*function)(llama_context *, llama_batch));
    int32_t compute_wanted(const llama_batch & batch, std::optional<Error> & stopped);

    llama_context * context_;
    ThreadPool * threads_;
    std::string name_;
    bool is_recurrent_;
    size_t input_width_;
    bool inputs_replace_;
    int32_t n_vocab_, n_batch_;
    int32_t n_positions_;               // that llama.cpp wants of each row of inputs without a token
    int32_t n_snapshots_;               // of a recurrent state that can be gone back to
    Together together_ = Together::all; // spans in one batch
    int32_t n_swa_;                     // tokens of a sliding window of attention, 0: none
    bool has_checkpoints_ = true;       // until llama.cpp refuses one
    std::vector<Sequence> sequences_;
    std::vector<Place> places_; // of the spans of the last evaluate()

    // A batch's arrays, kept between calls: llama_batch_init would allocate and free them every time.
    std::vector<int32_t> tokens_, n_seq_ids_;
    std::vector<llama_pos> positions_;
    std::vector<llama_seq_id> ids_;
    std::vector<llama_seq_id *> seq_ids_;
    std::vector<int8_t> outputs_;
    std::vector<float> inputs_;
};

// Whether a model's memory holds a recurrent state, alone or beside a KV cache.
bool is_recurrent(const llama_model * model);

// "general.architecture" of a model.
std::string model_architecture(const llama_model * model);

} // namespace pyfly
