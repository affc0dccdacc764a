// The governor: how many tokens to draft for each request, and with which drafter, so that expected tokens per second
// of the whole batch are highest. No llama.h. docs/design/governor.md has the derivation and what each rate is worth.
//
//     v = (n_requests + sum of A_request(i) over the drafted rows) / (C(all rows) + D), plain:
//     n_requests / C(n_requests)
//
//   C(n)       microseconds of a target batch of n rows: the machine's. If a batch of another size than the one before
//              costs more (CUDA records a graph for each size), a change is charged: one that the iteration itself
//              makes, and one back as often as other sizes follow
//   D          microseconds of the drafts: each drafter's, by how many requests draft how deep
//   A_request(i)  probability that a request's first i drafts are all accepted: the request's (acceptance.h)
//
// The length that is chosen is a draft's longest: it ends as soon as a further token is so unlikely to be right
// (confidence.h) that it is not worth its time. So where one request drafts alone, such a draft begins with all the
// tokens that the drafter may draft.
//
// Costs are measured beforehand where somebody did (expect_costs), and scaled by what iterations show; without, they
// are learned from iterations. It is never random, but it depends on measured times: which tokens are drafted is not
// reproducible (what is committed is, as far as the rule is exact).
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "acceptance.h"
#include "confidence.h"
#include "cost_curve.h"
#include "policy.h"
#include "pyfly.h"

namespace pyfly {

// What was measured right after loading, in microseconds > 0. More sizes are better; those between are interpolated.
struct MeasuredCosts {
    struct Rows {
        int32_t n; // rows of a batch
        double us;
    };
    struct Draft {
        int32_t drafter;
        int32_t n_requests, k; // so many requests, k tokens for each, in one go
        double us;
    };
    struct CatchUp {
        int32_t drafter;
        double us; // of a token, in batches
    };
    std::vector<Rows> target;
    std::vector<Draft> drafts;
    std::vector<CatchUp> catch_up;
    double change_us = 0.0; // more, for a target batch whose size is not that of the one before; 0: nothing
};

// What each is worth is in docs/design/governor.md.
struct GovernorSettings {
    double hysteresis = 1.03; // gain over plain decoding that drafting must promise
    double spent = 0.0025;    // of the time, at most, on trials of drafters that do not seem to pay; prompts likewise
    double credit = 1.0;      // most that is saved up for that, in plain steps of one request
    double stock = 4.0;       // saved up for prompts to begin with, in the same unit
    int32_t trial = 2;        // draft length of such a trial
    double stay = 10.0;       // iterations that a drafter which catches up is expected to stay
    double length = 64.0;     // tokens that a request is expected to have when it begins
    double beside = 1.5;      // times its price that following one must save where there are others, who come and go
    double hope = 0.95;       // acceptance of a drafter that follows a request on trial
    int32_t plain_every = 64; // iterations between two measurements of plain decoding
    double prior_slope = 0.1; // of C(n) / C(1) before a second size was measured; of a draft's step for n requests
    double change = 0.05;     // how far the price of a change follows a batch of another size
    double stays = 0.1;       // how far the share of drafts behind which the size stays follows one of them
    CostCurve::Rates costs;
    Acceptance::Rates acceptance;
    Confidence::Rates confidence;
};

class Governor : public Policy {
  public:
    using Settings = GovernorSettings;

    explicit Governor(Settings settings = {});

    // What is known of a drafter beforehand: whether its proposals exist at no cost, or else what it costs to draft a
    // token, relative to a target batch of one row (0: not known), and whether all tokens of a draft come in one go.
    void expect(int32_t drafter, bool is_free, double relative_cost, bool is_at_once = false);
    void expect_costs(const MeasuredCosts & costs);

    std::vector<Choice> choose(const std::vector<Candidate> & candidates) override;
    bool pays_to_follow(int32_t slot, int32_t drafter, int32_t k_max, int32_t n_requests, int64_t n_behind) override;
    DraftStop stop(int32_t drafter, int32_t k) override;

    void begin_request(int32_t slot) override;
    void observe_target(int32_t n_rows, double us) override;
    void observe_draft(int32_t drafter, const std::vector<int32_t> & asked, double us) override;
    void observe_catch_up(int32_t drafter, int64_t n_tokens, double us) override;
    void observe_acceptance(int32_t slot, int32_t drafter, int32_t proposal_class, int32_t n_drafted,
                            int32_t n_accepted) override;

    void observe_confidence(int32_t slot, int32_t drafter, const std::vector<float> & confidence, int32_t n_asked,
                            int32_t n_verified, size_t n_right, bool is_refuted) override;

    // For whoever wants to look: costs of drafts for one request, acceptance of all requests, steps of each request.
    void state(pyfly_governor_state & out) const;

  private:
    struct Arm {
        Arm(const Settings & settings);
        bool is_free = false;
        bool is_at_once = false;     // all tokens of a draft come in one go
        bool has_confidence = false; // its drafts end where it is unsure
        double relative_cost = 0.0;  // of drafting a token, relative to C(1); 0: not known
        CostCurve tokens;            // us of a draft of k tokens for one request
        CostCurve requests;          // of a draft's step for n requests, relative to one
        double us_per_caught_up = 0; // of evaluating a token in a batch; 0: not measured
        Acceptance acceptance;
        Confidence confidence;
        int32_t first_slot = -1; // that may follow while nothing is known of the acceptance
    };

    // One offer, weighed.
    struct Option {
        int32_t drafter, k_max;
        double catch_up_us;
        std::array<double, PYFLY_MAX_DEPTH> reached;           // A(1), A(2), ...
        std::array<double, PYFLY_MAX_DEPTH> drafted, verified; // how likely there is a first token, a second one, ...
    };
    struct Options {
        std::vector<Option> all;
        std::vector<size_t> begin; // [request], and the end
    };

    struct Plan {
        std::vector<const Option *> options; // [request]: which drafter it is about; nullptr: none
        std::vector<int32_t> k;              // [request]
        int32_t n_rows;                      // of all drafts, at most
        double tokens, us;
        double speed() const { return tokens / us; }
    };

    Arm & arm(int32_t drafter);
    double batch_us(double n_rows, int32_t n_requests) const;
    double draft_us(const Arm & arm, int32_t k) const;
    double last_us(const Arm & arm, int32_t k) const;
    double iteration_us(const Arm & arm, int32_t k, int32_t n_requests) const;
    bool pays(const Arm & arm, int32_t n, int32_t k, double reached, double next, bool is_drafted) const;
    double catch_up_us(const Arm & arm, int64_t n_behind) const;
    Options weigh(const std::vector<Candidate> & candidates) const;
    Plan plain(size_t n_requests) const;
    std::vector<const Option *> assign(const Options & options, double speed) const;
    Plan walk(std::vector<const Option *> assigned, double speed) const;
    bool could_pay(const Arm & arm, int32_t k_max, int32_t n_requests, double extra_us) const;
    void refund(int32_t slot, int32_t drafter, int32_t n_accepted);
    void explore(const std::vector<Candidate> & candidates, const Plan & plan, std::vector<Choice> & choices);

    Settings settings_;
    CostCurve target_;        // batches whose size is that of the one before
    double change_us_ = 0.0;  // more, for any other
    double stays_ = 0.5;      // share of drafts whose batch is followed by one of the same size
    int32_t n_rows_last_ = 0; // of the last batch; 0: not known
    bool was_draft_ = false;  // whether it had drafts
    int32_t n_requests_ = 0;  // of the iteration that was chosen last
    std::vector<Arm> arms_;
    std::array<int64_t, PYFLY_MAX_DEPTH + 1> steps_at_ = {};
    int32_t iterations_since_plain_ = 0;
    double saved_;  // for prompts, in plain steps of one request
    double credit_; // for trials, likewise
    int32_t tried_slot_ = -1, tried_drafter_ = -1;
    double us_per_token_ = 0.0; // of the iteration
    double row_us_ = 0.0;       // of a drafted row, where several requests share the batch
};

} // namespace pyfly
