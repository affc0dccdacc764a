// What proposes tokens for the target. One file per drafter beside this one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "distribution.h"
#include "draft_stop.h"
#include "model.h"

namespace pyfly {

// Tokens that a drafter proposes to follow a history; none is a valid answer.
struct Proposal {
    std::vector<int32_t> tokens;

    // [tokens][n_vocab], the drafter's own logits, of which each token is the argmax unless it was drawn; empty where
    // they were not asked for, or it has none.
    std::vector<float> rows;

    // [tokens], what each was drawn from; empty where none was.
    std::vector<Weights> drawn;

    // Where the request had a stop: how sure the drafter is of each token, [tokens], and behind these of the token that
    // the stop ended the draft before, if it did. dropped: that token; -1: there is none, or it is not known.
    std::vector<float> confidence;
    int32_t dropped = -1;

    // 0..7: proposals of one class are about equally likely to be right. The governor keeps acceptance by class.
    int32_t proposal_class = 0;

    bool is_from_answers = false; // found in an earlier answer
};

// Asks for a proposal of at most n_max tokens to follow `history` (not empty).
struct DraftRequest {
    int32_t slot; // of the request: 0 <= slot < n_slots of the drafter
    const std::vector<int32_t> * history;
    int32_t n_max;  // >= 1
    Proposal * out; // empty on entry
    bool wants_rows = false;

    // With it, a drafter that draws() gives what it draws from its rows, where it would give their argmax. Whether it
    // proposes a token at all must not depend on what was drawn.
    DrawDraft draw = {};

    // Decides for a drafter that knows how sure it is where its draft ends; empty: not before n_max.
    DraftStop stop = {};

    bool is_independent = false; // drafts can change its answer, and earlier answers must not
    int32_t owner = 0;           // pyfly_request_settings.owner
};

// A drafter holds its weights once and, for each of n_slots requests, what it has seen of it. It is always shown a
// request's whole history and compares it with what it has seen, so that nothing it holds can go stale: a rollback,
// another request in the same slot or a caller that stops midway need no notice. stretch.h has the rule for what it
// keeps.
class Drafter {
  public:
    virtual ~Drafter() = default;

    // Requests it can follow at the same time.
    virtual int32_t n_slots() const { return 1; }

    // Most tokens that it proposes, whatever it is asked for.
    virtual int32_t draft_most() const { return INT32_MAX; }

    // Whether it drafts all tokens in one go, so that a token more costs little.
    virtual bool drafts_at_once() const { return false; }

    // Catches up with at most one batch of `history`, of at most n_most >= 2 tokens, so that a long prompt can be
    // interrupted. Returns how many tokens are left to catch up with; call again until it is 0.
    virtual size_t prepare(int32_t slot, const std::vector<int32_t> & history, size_t n_most) {
        (void) slot, (void) history, (void) n_most;
        return 0;
    }

    // Tokens of `history` that prepare() would evaluate now, about; 0 for a drafter that has nothing to catch up with.
    virtual size_t n_behind(int32_t slot, const std::vector<int32_t> & history) const {
        (void) slot, (void) history;
        return 0;
    }

    // The target has just evaluated these spans, in this order, in one batch; some of their tokens may be drafts that
    // do not survive. A span's sequence is its slot. A drafter that reads the target's rows or hidden states takes them
    // here, before the next batch replaces them.
    // wanted[i]: whether the request of spans[i] drafts with it.
    virtual void observe(Model & target, const std::vector<Span> & spans, const std::vector<bool> & wanted) {
        (void) target, (void) spans, (void) wanted;
    }

    // Whether it drafts from what observe() shows it: of a prompt that is evaluated together with the first draft, it
    // has nothing to draft from yet.
    virtual bool reads_target() const { return false; }

    // A request begins whose first n < history.size() tokens the target holds: how many of them need not be evaluated
    // again. Less than n where a token or two more would spare the drafter from beginning anew.
    virtual size_t n_reusable(int32_t slot, const std::vector<int32_t> & history, size_t n) const {
        (void) slot, (void) history;
        return n;
    }

    // What it holds of a request goes: another owner's begins there.
    virtual void forget(int32_t slot) { (void) slot; }

    // The request `to`, with this history, takes over what is held of its beginning for the request `from`, where that
    // spares it evaluating.
    virtual void share(int32_t from, int32_t to, const std::vector<int32_t> & history) {
        (void) from, (void) to, (void) history;
    }

    // A request has ended, of which the caller was given all of `history`: the answer is what follows its first
    // n_prompt tokens. owner: pyfly_request_settings.owner.
    virtual void ended(const std::vector<int32_t> & history, size_t n_prompt, int32_t owner) {
        (void) history, (void) n_prompt, (void) owner;
    }

    // Answers all requests, of different slots, together. On an Error no request is answered.
    virtual void propose(const std::vector<DraftRequest> & requests) = 0;

    // Whether its proposals can have rows.
    virtual bool has_rows() const { return false; }

    // Whether it draws its tokens where a request says so.
    virtual bool draws() const { return false; }

    // Whether a draft costs nothing worth counting: it may be asked for only to see whether it would have been right.
    virtual bool is_free() const { return false; }

    // Whether it may be asked to draft for made-up tokens, to see what that costs.
    virtual bool can_be_measured() const { return !is_free(); }

    // A text to measure its drafts behind, in the target's tokens, if that must be one that people write; empty: any.
    virtual std::vector<int32_t> usual_text() const { return {}; }

    // What drafting a token costs, relative to the target's evaluating one, as far as it is known before it was
    // measured; 0: not known.
    virtual double expected_cost() const { return 0.0; }

    // Tokens evaluated on a model of its own so far.
    virtual int64_t n_evaluated() const { return 0; }
};

} // namespace pyfly

// The handle of pyfly.h.
struct pyfly_drafter {
    std::unique_ptr<pyfly::Drafter> impl;
};
