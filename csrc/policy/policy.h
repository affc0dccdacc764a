// How much is drafted for each request in its step, and by which drafter. policy/fixed.* and policy/governor.* decide.
// No llama.h.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "draft_stop.h"
#include "pyfly.h"

namespace pyfly {

// What a drafter could do for a request in this step.
struct Offer {
    int32_t drafter; // index
    int32_t k_max;   // most tokens it can draft, >= 1
    int32_t proposal_class = 0;
    int64_t n_behind = 0; // tokens it has to evaluate before it can draft
};

// A request that has a step in this iteration, with at least one row of its own.
struct Candidate {
    int32_t slot;
    std::vector<Offer> offers; // at most one of each drafter; none: it decodes plainly
};

struct Choice {
    int32_t drafter = -1; // -1: plain decoding
    int32_t k = 0;
};

class Policy {
  public:
    virtual ~Policy() = default;

    // The choice for each candidate, in their order. What else the iteration's batch holds (chunks of prompts, tokens
    // that are evaluated again) costs the same whatever is drafted, so it does not count: beside a long iteration every
    // draft would look cheap.
    virtual std::vector<Choice> choose(const std::vector<Candidate> & candidates) = 0;

    // Where a draft of at most k tokens that was just chosen ends; empty: nowhere before. Valid until the next choice.
    virtual DraftStop stop(int32_t drafter, int32_t k) {
        (void) drafter, (void) k;
        return {};
    }

    // Whether a request whose drafter had nothing to propose turns to the next one, in this very step.
    virtual bool asks_the_next() const { return false; }

    // Whether a drafter should evaluate the n_behind tokens of a request's prompt, so that it can draft for it from its
    // first token on. n_requests run at once.
    virtual bool pays_to_follow(int32_t slot, int32_t drafter, int32_t k_max, int32_t n_requests, int64_t n_behind) {
        (void) slot, (void) drafter, (void) k_max, (void) n_requests, (void) n_behind;
        return true;
    }

    // Another request begins in this place: what was accepted of the one before says less about it.
    virtual void begin_request(int32_t slot) { (void) slot; }

    // What an iteration showed. Times in microseconds, > 0.
    virtual void observe_target(int32_t n_rows, double us) { (void) n_rows, (void) us; }

    // `drafter` drafted for as many requests as `asked` has entries, in one go: asked[i] tokens for the i-th.
    virtual void observe_draft(int32_t drafter, const std::vector<int32_t> & asked, double us) {
        (void) drafter, (void) asked, (void) us;
    }
    virtual void observe_catch_up(int32_t drafter, int64_t n_tokens, double us) {
        (void) drafter, (void) n_tokens, (void) us;
    }

    // n_accepted of n_drafted were accepted in order; the next one, if there is one, was not. Not of drafts that
    // observe_confidence tells of.
    virtual void observe_acceptance(int32_t slot, int32_t drafter, int32_t proposal_class, int32_t n_drafted,
                                    int32_t n_accepted) {
        (void) slot, (void) drafter, (void) proposal_class, (void) n_drafted, (void) n_accepted;
    }

    // Of the tokens of a draft with a stop, the last of which may have been dropped, the first n_right were right and,
    // if is_refuted, the next one, if there is one, was not. confidence: see Proposal. n_asked: of its tokens.
    virtual void observe_confidence(int32_t slot, int32_t drafter, const std::vector<float> & confidence,
                                    int32_t n_asked, int32_t n_verified, size_t n_right, bool is_refuted) {
        (void) slot, (void) drafter, (void) confidence, (void) n_asked, (void) n_verified, (void) n_right,
            (void) is_refuted;
    }
};

} // namespace pyfly
