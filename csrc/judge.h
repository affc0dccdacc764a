// One position of a round: sampler, safety, gate and window decide, the transcript takes the token. No llama.h.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "answer.h"
#include "regions.h"
#include "rules/gate.h"
#include "sampler.h"
#include "transcript.h"
#include "vocabulary.h"
#include "window.h"

namespace pyfly {

// What one round drafted for a text.
struct Draft {
    int32_t drafter = -1; // index, -1: none
    std::vector<int32_t> tokens;
    std::vector<float> rows = {}; // [tokens][n_vocab], the drafter's own; empty: it has none, or no rule needs them

    const float * row(size_t i, size_t n_vocab) const { return rows.empty() ? nullptr : rows.data() + i * n_vocab; }
};

class Judge {
  public:
    // A text begins with `history`, whose answer may have begun before. `windows`: of a mismatch in each region.
    // `measures`: entropy, margin and probability of every token, not only of mismatches. Throws
    // Error(PYFLY_STATUS_INVALID) for a malformed window.
    Judge(const Vocabulary & vocabulary, Gate gate, std::vector<pyfly_window_config> windows, bool measures,
          Answer answer, const std::vector<int32_t> & history, std::unique_ptr<Sampler> sampler);

    // Settles position i of a round (i = draft.tokens.size(): the bonus), `row` [n_vocab] being the target's logits
    // there. Returns whether the round goes on. Positions come one after the other, because what the sampler does at
    // one depends on the tokens before it. Throws Error(PYFLY_STATUS_NOT_FINITE) for a row without a distribution.
    bool settle(const Draft & draft, size_t i, int32_t round, const float * row, Transcript & transcript,
                pyfly_stats & stats);

    // Rejects the oldest open window, if there is one: nothing can decide it any more.
    void give_up(Transcript & transcript, pyfly_stats & stats) { conclude(window_.give_up(), transcript, stats); }

    // Position of the oldest undecided mismatch, if there is one.
    std::optional<int64_t> oldest_open() const { return window_.oldest_open(); }

    // As it is before `position`.
    Answer answer(int64_t position) const {
        Answer answer = answer_;
        answer.truncate(position);
        return answer;
    }

    // Whether the sampler has to keep the row as gates see it (make_sampler).
    static bool keeps_shaped_rows(const Gate & gate, bool measures) { return measures || !gate.is_exact(); }

    // The sampler moves on to the next text.
    std::unique_ptr<Sampler> take_sampler() { return std::move(sampler_); }

  private:
    void conclude(const Window::Outcome & outcome, Transcript & transcript, pyfly_stats & stats);
    void measure(pyfly_record & record) const;

    const Vocabulary * vocabulary_;
    Gate gate_;
    Window window_;
    bool measures_;
    Answer answer_;
    std::unique_ptr<Sampler> sampler_;
    std::optional<RegionTracker> regions_; // nothing where the gate does not look at them
};

} // namespace pyfly
