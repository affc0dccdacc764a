// One request on the target: it says what to evaluate next and takes what came of it. batch.h merges several. No
// llama.h.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "judge.h"
#include "memory.h"
#include "transcript.h"

namespace pyfly {

// How a request is decoded.
struct RequestConfig : pyfly_request_settings {
    GateExpression gate;
    std::vector<int32_t> draft_max; // by drafter: most tokens it drafts in a step, 0: it is not asked
};

// The state between two steps:
//   transcript  committed tokens, then provisional ones (from the window's oldest open mismatch on)
//   memory      what the target has evaluated: a proper prefix of them. The last token is evaluated by the next step,
//               whose first row it yields; so are those before it that a recurrent target had to forget.
class Sequence {
  public:
    // Evaluates spans in one batch of the target and shows them to the drafters; throws Error.
    using Evaluate = std::function<void(const std::vector<Span> &)>;

    // Target and vocabulary are borrowed.
    Sequence(Model & target, const Vocabulary & vocabulary, int32_t slot, Evaluate evaluate)
        : target_(&target), vocabulary_(&vocabulary), memory_(target, slot), evaluate_(std::move(evaluate)) {}

    // A request begins, and its answer behind it. n_evaluated: how many of its tokens the target's memory holds, what
    // lies behind them goes; without it, as many as it is known to hold. An error changes nothing, unless the target's
    // memory could not be cut.
    void begin(RequestConfig config, std::vector<int32_t> history, std::optional<size_t> n_evaluated,
               std::unique_ptr<Sampler> sampler);

    // It and its answer go on behind its first n_keep tokens, the last of which the last step committed, with
    // tokens[n] of the caller.
    void resume(size_t n_keep, const int32_t * tokens, size_t n_tokens);

    // The target's memory holds the first n_keep positions now, for others to look at between two iterations.
    void park(size_t n_keep);

    // The request ends and the memory holds its first n_keep positions; what it does not hold of them is evaluated,
    // unless that has just failed. everything: what it holds of the committed tokens stays, nothing is evaluated.
    static constexpr size_t everything = SIZE_MAX;
    void end(size_t n_keep);

    bool has_request() const { return has_request_; } // from begin() to end(), also after an error
    bool is_active() const { return is_active_; }     // steps may follow

    // ---- One iteration, in this order: what is planned is evaluated and then taken, postponed or failed ------------

    // Tokens that the target's memory does not hold, >= 1.
    size_t n_unevaluated() const { return transcript_.n() - memory_.n(); }

    // Tokens that have to be evaluated before a step; 0: a step may come. n_with_step: most tokens that may go with
    // the step's batch.
    size_t n_left(size_t n_with_step) const;
    const Span & plan_prompt(size_t n_most); // 1 <= n_most: evaluates at most so many of them

    // Most tokens that may be drafted in a step, at most n_room of which are wanted; < 1: none.
    int64_t draft_limit(int64_t n_room) const;
    const Span & plan_step(Draft draft);

    // Nothing was drafted for the step: a window that a match would have to decide is rejected. Returns whether tokens
    // were taken back; there may be a draft behind the target's own choice, and tokens to evaluate before it.
    bool be_silent();

    // Of a request whose prompt is being evaluated: another one has its first n tokens, too. Where the target is
    // limited, the state behind them is kept for it, if they are worth it. Returns whether it is worth waiting for.
    bool keep_at(size_t n);

    // A draft for a step begins: how it is drawn; empty: the most probable tokens are drafted. Valid until the request
    // ends.
    DrawDraft draw_draft();

    // `span`: its index in the target's last evaluate().
    void take(size_t span, int64_t us);
    void postpone();               // it was not evaluated: another time
    void fail(bool has_evaluated); // nothing follows but end()
    void begin_iteration();        // what the last one brought goes

    const Transcript & transcript() const { return transcript_; }
    Memory & memory() { return memory_; }
    const Memory & memory() const { return memory_; }
    const RequestConfig & config() const { return config_; }
    int32_t n_steps() const { return step_; }

    // Tokens of the last request's prompt up to the end of its last message: who goes on behind them continues it,
    // whatever became of the answer. Stays when the request ends.
    size_t n_messages() const { return n_messages_; }

    // What the step that was just taken had drafted, and where.
    const Draft & draft() const { return draft_; }
    size_t draft_begin() const { return n_before_; }

    const float * prompt_row(int32_t position) const;

    pyfly_stats & stats() { return stats_; }
    const pyfly_stats & stats() const { return stats_; }
    void reset_stats();

  private:
    enum class Planned { nothing, prompt, step };

    void begin(RequestConfig config, std::vector<int32_t> history, std::optional<size_t> n_evaluated,
               int64_t answer_begin, std::unique_ptr<Sampler> sampler, Random random);
    bool is_limited() const { return target_->is_limited(); }
    int64_t draft_max() const;
    void require_request(const std::vector<int32_t> & history) const;
    void count_evaluated(size_t n) { (step_ == 0 ? stats_.prefilled : stats_.replayed) += static_cast<int64_t>(n); }
    void uncount(size_t n);
    void catch_up(size_t n);
    void checkpoint(bool is_kept);
    size_t find_end_of_messages(const std::vector<int32_t> & prompt) const;
    void choose_kept(size_t n_alike);
    size_t next_kept() const;
    void take_step(size_t span, int64_t us);
    void fall_back();
    void keep(size_t n);

    Model * target_;
    const Vocabulary * vocabulary_;
    Memory memory_;
    Evaluate evaluate_;
    RequestConfig config_ = {{}, GateExpression::exact(), {}};
    Transcript transcript_;
    std::unique_ptr<Judge> judge_;
    bool is_active_ = false;
    bool has_request_ = false;
    bool is_broken_ = false; // evaluating failed
    int32_t step_ = 0;

    size_t n_messages_ = 0;
    std::vector<size_t> kept_; // places in the prompt where a limited target's state is to be kept, ascending
    Planned planned_ = Planned::nothing;
    std::vector<int32_t> tokens_; // of the plan
    Span span_ = {};
    Draft draft_;
    size_t n_before_ = 0;
    size_t prompt_span_ = 0;                            // of the last prompt chunk with all rows
    int32_t prompt_row_begin_ = 0, prompt_row_end_ = 0; // its positions
    pyfly_stats stats_ = {};
    bool counts_step_ = false; // the records of the last step are counted in it
};

} // namespace pyfly
