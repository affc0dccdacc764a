// One position of a step: sampler, safety, gate and window decide, the transcript takes the token. No llama.h.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "gates/expression.h"
#include "random.h"
#include "sampler.h"
#include "transcript.h"
#include "vocabulary.h"
#include "window.h"

namespace pyfly {

// What one step drafted for a request.
struct Draft {
    int32_t drafter = -1; // index, -1: none
    std::vector<int32_t> tokens;
    std::vector<float> rows = {};    // [tokens][n_vocab], the drafter's own; empty: it has none, or no gate needs them
    std::vector<Weights> drawn = {}; // [tokens], what each was drawn from; empty: nobody drew them

    Weights q(size_t i) const { return drawn.empty() ? Weights{{tokens[i], 1.0}} : drawn[i]; }
    const float * row(size_t i, size_t n_vocab) const { return rows.empty() ? nullptr : rows.data() + i * n_vocab; }
};

class Judge {
  public:
    // The answer begins at this position. `measures`: entropy, margin and probability of every token, not only of
    // mismatches. `random`: for a gate with speculative sampling. Throws Error(PYFLY_STATUS_INVALID) for a malformed
    // window, or one that the gate has no use for.
    Judge(const Vocabulary & vocabulary, GateExpression gate, const pyfly_window_config & window, bool measures,
          int64_t answer_begin, std::unique_ptr<Sampler> sampler, Random random);

    // Settles a step, rows(i) [n_vocab] being the target's logits at its position i; i = draft.tokens.size(): those of
    // the bonus. Throws Error(PYFLY_STATUS_NOT_FINITE) if the first row has no distribution; before another such row
    // the step ends, unless a window is open.
    using Rows = std::function<const float *(size_t i)>;
    void settle(const Draft & draft, int32_t step, const Rows & rows, Transcript & transcript, pyfly_stats & stats);

    // Settles position i of a draft as if the draft began there, and what follows as far as its window needs that.
    void settle_one(const Draft & draft, size_t i, const Rows & rows, Transcript & transcript, pyfly_stats & stats);

    // Whether choices are drawn by speculative sampling; not where a choice is an argmax.
    bool draws() const { return gate_.draws() && sampler_->distributions() != nullptr; }

    // A step's draft begins, in place of one that was not settled: it is drawn with the same numbers. So a step that
    // could not be evaluated leaves no trace, whatever it had drafted. Requires draws(), as does what follows.
    void begin_draft() { random_ = settled_; }

    // Draws a token of it, see DrawDraft.
    int32_t draw_draft(const float * row, size_t n, std::vector<Weights> & drawn);

    // Rejects the oldest open window, if there is one: nothing can decide it any more.
    void give_up(Transcript & transcript, pyfly_stats & stats) { conclude(window_.give_up(), transcript, stats); }

    // The same where nothing is drafted that could decide one. Returns whether tokens were taken back.
    bool be_silent(Transcript & transcript, pyfly_stats & stats) {
        const Window::Outcome outcome = window_.silence();
        conclude(outcome, transcript, stats);
        return outcome.has_value();
    }

    // Position of the oldest undecided mismatch, if there is one.
    std::optional<int64_t> oldest_open() const { return window_.oldest_open(); }

    int64_t answer_begin() const { return answer_begin_; }

    // Whether the sampler has to keep the row as gates see it (make_sampler).
    static bool keeps_shaped_rows(const GateExpression & gate, bool measures) { return measures || !gate.is_exact(); }

    // The sampler moves on to the next request, and so do the random numbers.
    std::unique_ptr<Sampler> take_sampler() { return std::move(sampler_); }
    const Random & random() const { return settled_; }

  private:
    bool settle_position(const Draft & draft, size_t i, int32_t step, const float * row, Transcript & transcript,
                         pyfly_stats & stats);
    int32_t choose(const Draft & draft, size_t i, const float * row);
    pyfly_reason judge_mismatch(const Draft & draft, size_t i, bool is_safe, const Transcript & transcript,
                                pyfly_record & record) const;
    Window::Outcome end_step(int32_t choice);
    void conclude(const Window::Outcome & outcome, Transcript & transcript, pyfly_stats & stats);
    void measure(pyfly_record & record, const float * shaped_row, int32_t drafted) const;
    size_t n_vocab() const { return static_cast<size_t>(vocabulary_->n()); }

    const Vocabulary * vocabulary_;
    GateExpression gate_;
    Window window_;
    bool measures_;
    int64_t answer_begin_;
    std::unique_ptr<Sampler> sampler_;
    Random random_, settled_; // now, and behind the last step
};

} // namespace pyfly
