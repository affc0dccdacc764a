// The governor: how many tokens to draft next, and with which drafter, so that expected tokens per second is highest.
// No llama.h. The derivation is in docs/governor.md.
//
//     v(a, k) = (1 + sum_{i=1..k} A_a(i)) / (C(k + 1) + D_a(k)),    v(plain) = 1 / C(1)
//
//   C(n)    seconds of a target batch of n rows (cost_curve.h)
//   D_a(k)  seconds that drafter a takes for k tokens
//   A_a(i)  probability that its first i drafts are all accepted, by class of proposal
//
// Everything is learned from the rounds as they happen and forgotten at the pace of about ten rounds. It is never
// random, but it depends on measured times: with it, which tokens are drafted is not reproducible (what is committed
// is, as far as the gate is exact).
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "cost_curve.h"
#include "pyfly.h"

namespace pyfly {

class Governor {
  public:
    static constexpr int32_t n_classes = 8;       // classes of proposals told apart, see Drafter::proposal_class
    static constexpr int64_t first_patience = 16; // idle rounds before a drafter is tried again, at first

    // What could be done in this round.
    struct Offer {
        int32_t drafter; // index
        int32_t k_max;   // most tokens it can draft, >= 1
        int32_t proposal_class;
        int64_t n_behind = 0; // tokens it has to evaluate before it can draft
    };

    struct Choice {
        int32_t drafter = -1; // -1: plain decoding
        int32_t k = 0;
        double speed = 0.0; // tokens per microsecond that it was chosen for
    };

    // What is known of a drafter beforehand: whether its proposals exist at no cost, or else what it costs to draft a
    // token, relative to a target batch of one row (0: not known).
    void expect(int32_t drafter, bool is_free, double relative_cost);

    Choice choose(const std::vector<Offer> & offers);

    // Whether a drafter could pay if nearly all its drafts were accepted: whether it is worth keeping up to date.
    bool can_pay(int32_t drafter, int32_t k_max) const;

    // Another text begins: what was accepted of the one before says less about it, and models get new credit.
    void begin_text();

    // What a round showed. Times in microseconds, > 0.
    void observe_target(int32_t n_rows, double us);
    void observe_draft(int32_t drafter, int32_t k, double us);           // k tokens were asked for
    void observe_catch_up(int32_t drafter, int64_t n_tokens, double us); // n_tokens evaluated in batches
    void observe_length(int64_t n_tokens);                               // tokens that came; < 0: taken back
    // n_accepted of n_drafted were accepted in order; the next one, if there is one, was not.
    void observe_acceptance(int32_t drafter, int32_t proposal_class, int32_t n_drafted, int32_t n_accepted);

    // Estimates, for choosing and for whoever wants to look. Seconds are microseconds; 0 where nothing is known yet.
    double target_cost(int32_t n_rows) const;
    double draft_cost(int32_t drafter, int32_t k) const;
    double catch_up_cost(int32_t drafter) const; // of a token, in batches
    double acceptance(int32_t drafter, int32_t proposal_class, int32_t depth) const;
    double acceptance(int32_t drafter, int32_t depth) const; // of the class that was seen most of late
    int64_t rounds_at(int32_t k) const { return rounds_at_[static_cast<size_t>(k)]; }

  private:
    static constexpr double typical_length = 100.0; // tokens of a text, before there was one
    static constexpr double prior_slope = 0.25;     // of C(n) / C(1) per row before a second size was measured

    // Accepted and seen drafts at each depth, decaying.
    struct Acceptance {
        std::array<double, PYFLY_MAX_DEPTH> accepted = {}, seen = {};
        bool last_outcome = false; // whether the first draft was accepted, the last time
        double run_likelihood = 1; // of the run of equal outcomes that it ends, by the estimates before each
    };

    struct Arm {
        bool is_free = false;
        double expected_cost = 0.0; // of drafting a token, relative to C(1); 0: not known
        CostCurve draft = CostCurve::from_zero();
        double us_per_caught_up = 0.0; // of evaluating a token in a batch; 0: not measured
        std::array<Acceptance, n_classes> classes = {};
        int64_t rounds_idle = 0;           // since it was last used
        int64_t patience = first_patience; // idle rounds before it is tried again though it does not seem to pay
        int64_t least_patience() const { return is_free ? first_patience : 1; }
    };

    static void fade(Acceptance & counts, double kept);
    const Arm * arm(int32_t drafter) const;
    Arm & arm(int32_t drafter);
    Choice first_attempt(const std::vector<Offer> & offers);
    Choice retry(const std::vector<Offer> & offers);
    bool is_worth_a_retry(const Offer & offer, int32_t k); // pays for it if so
    double cost_of_catching_up(const Offer & offer) const;
    double rest() const;
    double rounds_to_stay(double tokens) const;
    double believed_share(int32_t drafter) const;
    double rounds_between_plain(const Choice & choice) const;
    Choice best(const std::vector<Offer> & offers, std::optional<double> hoped_for = std::nullopt) const;

    double cost(int32_t n_rows) const;
    double cost_of_drafting(int32_t drafter, int32_t k) const;

    CostCurve target_ = CostCurve::from_one(prior_slope);
    std::vector<Arm> arms_;
    std::array<int64_t, PYFLY_MAX_DEPTH + 1> rounds_at_ = {};
    int64_t rounds_since_plain_ = 0;
    double n_text_ = 0.0, n_typical_ = typical_length; // tokens of this text, and of a usual one
    double retries_us_ = 0.0;                          // that retries have cost in this text
    bool is_retry_ = false;                            // whether the last choice was paid for by them
};

} // namespace pyfly
