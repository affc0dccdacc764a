// What the requests of a batch draft with: the drafters and the policy that chooses among them. No llama.h.
#pragma once

#include <memory>
#include <vector>

#include "drafters/drafter.h"
#include "policy/fixed.h"
#include "policy/governor.h"
#include "request.h"

namespace pyfly {

struct BatchDrafter {
    Drafter * drafter; // borrowed
    int32_t draft_max; // most tokens it drafts in a step
};

class Drafting {
  public:
    // Borrowed: a request for each of the target's sequences.
    Drafting(Model & target, const Vocabulary & vocabulary, std::vector<Request> & requests)
        : target_(target), vocabulary_(vocabulary), requests_(requests) {}

    Drafting(const Drafting &) = delete;
    Drafting & operator=(const Drafting &) = delete;

    // See pyfly_batch_configure; no request may run. An Error changes nothing.
    void configure(bool is_adaptive, std::vector<BatchDrafter> drafters);

    // See pyfly_batch_expect: of the drafters that were configured. Throws Error(PYFLY_STATUS_INVALID) for others.
    void expect_costs(const MeasuredCosts & costs);

    const std::vector<BatchDrafter> & drafters() const { return drafters_; }

    // For RequestConfig: one for each drafter, or null for what the drafters were given.
    std::vector<int32_t> draft_max(const int32_t * draft_max) const;

    // Throws Error(PYFLY_STATUS_INVALID) unless it is 0..n_batch - 1.
    void require_draft_max(int32_t k) const;

    // Throws Error(PYFLY_STATUS_INVALID) where the gate needs rows of a drafter and none that is asked has them.
    void require_rows(const RequestConfig & config) const;

    void begin_request(int32_t slot) { policy_->begin_request(slot); }

    // What the drafters hold of a slot's request goes.
    void forget(int32_t slot);

    // A request takes over what the drafters hold of what it has in common with another one.
    void share(const Request & from, const Request & to);

    // Tokens of the request that a drafter which will be asked soon has to evaluate, before the request's first step.
    size_t n_behind(const Request & request) const;

    // Of the n tokens that the target holds of a request that begins, as many as need not be evaluated again.
    size_t n_reusable(const Request & request, size_t n) const;

    // Whether the request's first draft has to wait until its prompt is evaluated.
    bool drafts_behind_prompt(const Request & request) const;

    // One batch, of at most n_most >= 2 tokens, of what the first drafter that is behind has missed. A request stops
    // where that fails.
    void prepare(Request & request, size_t n_most);

    // A draft for each of these requests, in their order. A request stops where drafting fails for it.
    std::vector<Draft> draft(const std::vector<Request *> & requests);

    // The target has evaluated these spans, in one batch.
    void observe(const std::vector<Span> & spans);

    // A batch of n_rows tokens with a row each took so many microseconds.
    void observe_target(int32_t n_rows, double us) { policy_->observe_target(n_rows, us); }

    // A request is about to end, of which the caller was given the first n tokens.
    void end_request(const Request & request, size_t n);

    // The request has taken what came of a step.
    void learn(Request & request);

    const Governor * governor() const { return governor_.get(); }

  private:
    // A request that drafts in this iteration.
    struct Turn {
        Request * request;
        Draft draft;
        Proposal proposal;          // of the drafter that was chosen
        std::vector<Proposal> free; // of the free drafters, by index; asked for before anything was chosen
    };
    using Turns = std::vector<Turn>;

    int32_t n_running() const;
    size_t n_behind(const Request & request, size_t drafter) const;
    void fail(Request & request);
    size_t catch_up(const Request & request, size_t drafter, size_t n_most = SIZE_MAX);
    std::vector<Candidate> offer(Turns & turns);
    void choose(Turns & turns);
    void ask_chosen(size_t drafter, Turns & turns, const std::vector<Choice> & choices);
    void learn_confidence(const Request & request, size_t n_right);
    void ask(size_t drafter, const std::vector<DraftRequest> & requests);

    Model & target_;
    const Vocabulary & vocabulary_;
    std::vector<Request> & requests_;
    std::vector<BatchDrafter> drafters_;
    FixedPolicy fixed_;
    std::unique_ptr<Governor> governor_; // keeps what it has learned while the drafters stay the same
    Policy * policy_ = &fixed_;
};

} // namespace pyfly
