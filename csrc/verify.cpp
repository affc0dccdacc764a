#include "verify.h"

#include <memory>
#include <string>

#include "error.h"
#include "judge.h"
#include "random.h"
#include "speculative.h"

namespace pyfly {

namespace {

void require_row(const float * row, size_t n_vocab, const char * which, size_t i) {
    if (!row_max(row, n_vocab).finite) {
        throw Error(PYFLY_STATUS_NOT_FINITE, std::string(which) + " row " + std::to_string(i) +
                                                 " has no distribution: NaN, +inf, or -inf everywhere");
    }
}

// The target's choices in a step, each made once, in their order.
class Choices {
  public:
    Choices(const float * logits, size_t n_vocab, const int32_t * draft, size_t n_draft, const float * draft_logits,
            const int32_t * given, bool draws, uint64_t seed)
        : logits_(logits), n_vocab_(n_vocab), draft_(draft), n_draft_(n_draft), draft_logits_(draft_logits),
          given_(given), draws_(draws), random_(seed) {}

    int32_t at(size_t i) {
        while (made_.size() <= i) {
            made_.push_back(make(made_.size()));
        }
        return made_[i];
    }

  private:
    int32_t make(size_t i) {
        const float * row = logits_ + i * n_vocab_;
        require_row(row, n_vocab_, "logits", i);
        if (given_ != nullptr) {
            return given_[i];
        }
        if (!draws_) {
            return row_max(row, n_vocab_).token;
        }
        const Weights p = softmax(row, n_vocab_);
        return i == n_draft_ ? draw(p, random_.uniform()) : choose_beside(p, q(i), draft_[i], random_);
    }

    // What the draft token was drawn from.
    Weights q(size_t i) const {
        Weights q = {{draft_[i], 1.0}};
        if (draft_logits_ != nullptr) {
            require_row(draft_logits_ + i * n_vocab_, n_vocab_, "draft_logits", i);
            q = softmax(draft_logits_ + i * n_vocab_, n_vocab_);
        }
        if (!(weight(q, draft_[i]) > 0.0)) {
            throw Error(PYFLY_STATUS_INVALID, "draft token " + std::to_string(draft_[i]) +
                                                  " cannot be drawn from row " + std::to_string(i) +
                                                  " of draft_logits; give the rows that the draft was drawn from");
        }
        return q;
    }

    const float * logits_;
    size_t n_vocab_;
    const int32_t * draft_;
    size_t n_draft_;
    const float * draft_logits_;
    const int32_t * given_;
    bool draws_;
    Random random_;
    std::vector<int32_t> made_;
};

// Makes them from position `begin` on.
class ChoicesSampler : public Sampler {
  public:
    ChoicesSampler(Choices & choices, size_t begin) : choices_(&choices), next_(begin) {}

    int32_t choose(const float * row, size_t) override {
        row_ = row;
        return choices_->at(next_++);
    }
    const float * shaped_row() override { return row_; }
    bool could_draw(int32_t) const override { return true; }
    void accept(int32_t) override {}
    std::unique_ptr<Sampler> clone() const override { return std::make_unique<ChoicesSampler>(*this); }

  private:
    Choices * choices_;
    size_t next_;
    const float * row_ = nullptr;
};

} // namespace

Verified verify_step(const float * logits, const Vocabulary & vocabulary, const int32_t * draft, size_t n_draft,
                     const float * draft_logits, const int32_t * choices, const GateExpression & gate,
                     const pyfly_window_config & window, const int32_t * answered, int64_t n_answered, uint64_t seed) {
    const size_t n_vocab = static_cast<size_t>(vocabulary.n());
    if (window.across_steps) {
        throw Error(PYFLY_STATUS_INVALID, "verification of one step cannot look across steps; set across_steps to 0");
    }
    if (gate.needs_draft_rows() && draft_logits == nullptr && n_draft > 0) {
        throw Error(PYFLY_STATUS_INVALID,
                    "the gate compares the draft's distribution with the target's; give draft_logits");
    }
    if (gate.looks_at_answer() && answered == nullptr && n_answered > 0 && n_draft > 0) {
        throw Error(PYFLY_STATUS_INVALID, "the gate looks at the answer's tokens; give answered");
    }
    if (gate.draws() && choices != nullptr) {
        throw Error(PYFLY_STATUS_INVALID, "speculative sampling draws the target's tokens itself; give a seed instead");
    }
    Draft drafted = {0, {draft, draft + n_draft}};
    if (gate.needs_draft_rows() && draft_logits != nullptr) {
        for (size_t i = 0; i < n_draft; i++) {
            require_row(draft_logits + i * n_vocab, n_vocab, "draft_logits", i);
        }
        drafted.rows.assign(draft_logits, draft_logits + n_draft * n_vocab);
    }
    Choices chosen(logits, n_vocab, draft, n_draft, draft_logits, choices, gate.draws(), seed);
    // The answer's tokens if they are given, then the draft up to a position.
    std::vector<int32_t> history(answered, answered + (answered != nullptr ? n_answered : 0));
    const int64_t answer_begin = static_cast<int64_t>(history.size()) - n_answered;

    // What the judge settles from position `begin` of the draft on; without `is_whole` that position alone.
    const auto settled = [&](size_t begin, bool is_whole) {
        Judge judge(vocabulary, gate, window, true, answer_begin, std::make_unique<ChoicesSampler>(chosen, begin),
                    Random(seed));
        Transcript transcript;
        pyfly_stats stats = {};
        transcript.begin(history, n_vocab, {false, false});
        const auto row = [&](size_t i) { return logits + i * n_vocab; };
        if (is_whole) {
            judge.settle(drafted, 0, row, transcript, stats);
        } else {
            judge.settle_one(drafted, begin, row, transcript, stats);
        }
        transcript.commit(static_cast<int64_t>(transcript.n()), stats);
        return transcript.records();
    };

    Verified verified;
    for (const pyfly_record & record : settled(0, true)) {
        verified.tokens.push_back(record.token);
    }
    for (size_t i = 0; i < n_draft; i++) {
        const pyfly_record record = settled(i, false).front();
        verified.decisions.push_back({record.reason, record.choice, record.entropy, record.margin});
        history.push_back(draft[i]);
    }
    return verified;
}

} // namespace pyfly
