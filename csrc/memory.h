// What one sequence has in one model: the tokens that are evaluated. Target, draft model and heads each have one for
// every request. No llama.h.
#pragma once

#include <vector>

#include "model.h"

namespace pyfly {

class Memory {
  public:
    // The model is borrowed; 0 <= sequence < model.n_sequences().
    Memory(Model & model, int32_t sequence) : model_(&model), sequence_(sequence) {}

    // Evaluated, at positions 0, 1, ...
    const std::vector<int32_t> & tokens() const { return tokens_; }
    size_t n() const { return tokens_.size(); }
    int32_t sequence() const { return sequence_; }
    Model & model() const { return *model_; }

    // How many of the first tokens of text[n_text] it begins with.
    size_t n_common(const int32_t * text, size_t n_text) const;

    // Somebody else (the caller's own evaluations, a restored state) left these tokens at the beginning of the model's
    // memory; what lies behind them is forgotten. Fewer are held then where the model cannot go back to exactly them.
    void assume(std::vector<int32_t> tokens);

    // Keeps the first n positions, or fewer where the model cannot go back to exactly n. Returns n().
    size_t truncate(size_t n);

    // Forgets everything, checkpoints too.
    void clear();

    // tokens[n] behind what is held, as a span for Model::evaluate. Borrowed.
    Span span(const int32_t * tokens, size_t n, size_t first_row) const;

    // The model has evaluated this span of it, or has failed to.
    void evaluated(const Span & span);
    void failed();

    // Copies the present state where the model needs that to come back to it (Model::checkpoint). False if it cannot.
    bool checkpoint(bool is_kept);

    // Whether there is a checkpoint of exactly what is held now.
    bool is_checkpointed() const;

    // The kept checkpoints, the shortest first.
    std::vector<Checkpoints::Checkpoint> kept() const;

    // Positions of the longest of them that is of what is held; 0: there is none.
    size_t n_kept() const;

    // Forgets checkpoints that are not of a prefix of text[n_text].
    void forget_other_checkpoints(const int32_t * text, size_t n_text);

    // A state that was kept elsewhere, behind tokens[n]: what is held begins with them, or will once assume() is told.
    void restore_checkpoint(const int32_t * tokens, size_t n, Checkpoints::State state);

    // How many of the first n positions, which it holds, another sequence can take over.
    size_t n_shareable(size_t n) const;

    // Takes over the first n = from.n_shareable(n) positions of another sequence in the same model; what it held goes.
    // False, and it is empty, where the model cannot share them.
    bool share(const Memory & from, size_t n);

    // Drops the first n positions, the others move up. False, and nothing changed, where the model cannot do that.
    bool shift(size_t n);

    // Somebody else may use the model's memory now. Throws Error, and is empty, where the model cannot go back to what
    // is held.
    void settle();

    // As settle(), where an Error would be one too many: what cannot be gone back to is lost.
    void release();

  private:
    Model * model_;
    int32_t sequence_;
    std::vector<int32_t> tokens_;
    std::vector<int32_t> checkpointed_; // tokens of the longest checkpoint; the others are of prefixes
};

} // namespace pyfly
