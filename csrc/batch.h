// Several texts on one target: what they want evaluated goes in one batch, and what came of it goes back to each. No
// llama.h.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "drafters/drafter.h"
#include "policy/fixed.h"
#include "policy/governor.h"
#include "policy/outcomes.h"
#include "sequence.h"

namespace pyfly {

struct BatchDrafter {
    Drafter * drafter; // borrowed
    int32_t draft_max; // most tokens it drafts in a round
};

// Why a text stopped.
struct Failure {
    pyfly_status status = PYFLY_OK;
    std::string message;
};

// A text has a slot while it runs: a sequence of the target and a place in every drafter. What is left in a slot when
// its text ended serves the next text that begins alike.
//
// A text that joins evaluates its prompt in chunks, between which the others go on. Texts that begin alike share what
// is evaluated of it. When the target's cache is full, the youngest text waits: what it had is forgotten and evaluated
// again when another text has ended. A batch that fails is tried again in halves, so that it ends no text but the one
// that cannot be evaluated alone.
class Batch {
  public:
    // Target and vocabulary are borrowed. As many slots as the target has sequences.
    Batch(Model & target, const Vocabulary & vocabulary);

    Batch(const Batch &) = delete;
    Batch & operator=(const Batch &) = delete;

    // What all texts draft with, see pyfly_batch_configure. Throws Error(PYFLY_STATUS_INVALID) while one runs.
    void configure(bool is_adaptive, std::vector<BatchDrafter> drafters, int32_t n_chunk);

    int32_t n_slots() const { return static_cast<int32_t>(texts_.size()); }
    const Sequence & at(int32_t slot) const { return texts_[static_cast<size_t>(slot)].sequence; }

    // The free slot that holds most of what this text begins with; -1 if none is free.
    int32_t find_slot(const int32_t * history, size_t n_history) const;

    // See pyfly_batch_expect: of the drafters that were configured.
    void expect_costs(const MeasuredCosts & costs);

    // What measuring.h needs of it, between texts.
    void require_idle() const; // throws Error(PYFLY_STATUS_INVALID) while a text runs
    Model & target() { return target_; }
    const std::vector<BatchDrafter> & drafters() const { return drafters_; }
    Memory & memory(int32_t slot) { return text(slot).sequence.memory(); }

    // For RequestConfig: one for each drafter, or null for what the drafters were given.
    std::vector<int32_t> draft_max(const int32_t * draft_max) const;

    // See Sequence. Throws Error(PYFLY_STATUS_INVALID) for a draft_max outside 0..n_batch - 1.
    void begin(int32_t slot, RequestConfig config, std::vector<int32_t> history, std::optional<size_t> n_evaluated,
               std::unique_ptr<Sampler> sampler);
    void resume(int32_t slot, size_t n_keep, const int32_t * tokens, size_t n_tokens);
    void park(int32_t slot, size_t n_keep) { text(slot).sequence.park(n_keep); }
    void end(int32_t slot, size_t n_keep);

    // How many more tokens are wanted of a text, >= 1. Counts down with what is committed, never below 1.
    void want(int32_t slot, int32_t n_room);

    // A held text does nothing in a step, but keeps its slot and what it has in the cache. Beginning lets it go.
    void hold(int32_t slot, bool is_held) { text(slot).is_held = is_held; }

    // Tokens of the prompt, or of what has to be evaluated again, before the text's next round; 0: the next step brings
    // a round.
    size_t n_left(int32_t slot) const;

    // Every running text goes on: with a chunk of its prompt or with a round, unless it waits or is held.
    struct Progress {
        int32_t slot;
        bool is_waiting;
        Failure failure; // the text stopped in this step; only end() may follow
    };
    const std::vector<Progress> & step();

    // Why the text in this slot stopped in the last step, if it did.
    const Failure & failure(int32_t slot) const { return text(slot).failure; }

    void reset_stats(int32_t slot) { text(slot).sequence.stats() = {}; }
    const Governor * governor() const { return governor_.get(); }

  private:
    struct Text {
        Sequence sequence;
        int64_t order = 0; // of its beginning: the smaller, the older
        int64_t used = 0;  // when its slot was used last
        int32_t n_room = Model::unlimited;
        bool is_prepared = false; // the drafters have caught up with the prompt
        bool is_waiting = false;  // there was no room for it
        bool is_held = false;     // somebody wants it to pause
        bool is_suspect = false;  // a batch with it failed: it is evaluated alone
        Failure failure = {};
        Outcomes outcomes = {};
        int32_t n_asked = 0; // of the draft that is planned: how many were asked of a drafter that is not free
        int32_t proposal_class = 0;

        int32_t slot() const { return sequence.memory().sequence(); }
        bool is_running() const { return sequence.is_active() && !is_waiting; }
    };

    // What a text wants evaluated in this step.
    struct Plan {
        Text * text;
        Span span;
    };
    using Plans = std::vector<Plan>;

    // A text that drafts in this step.
    struct Drafting {
        Text * text;
        Draft draft;
        Proposal proposal;          // of the drafter that was chosen
        std::vector<Proposal> free; // of the free drafters, by index; asked for before anything was chosen
    };

    Text & text(int32_t slot) { return texts_[static_cast<size_t>(slot)]; }
    const Text & text(int32_t slot) const { return texts_[static_cast<size_t>(slot)]; }
    void require_draft_max(int32_t k) const;
    std::vector<Text *> running_by_age();
    size_t n_with_round(const Text & text) const;
    size_t n_behind(const Text & text, size_t drafter) const;
    size_t n_behind(const Text & text) const;
    size_t catch_up(const Text & text, size_t drafter);
    static void stop(Text & text, bool has_evaluated);

    bool may_return(const Text & text) const;
    bool waits_for_prefix(Text & text);
    void prepare(Text & text);
    Plans plan_prompts(const std::vector<Text *> & joining, size_t n_most);
    void evaluate(const std::vector<Span> & spans);
    void evaluate_parts(const Plans & plans);
    void evaluate_plans(const Plans & plans);
    bool make_room(const Plans & plans);
    void take(const Plans & plans, int64_t us);

    void draft(std::vector<Drafting> & texts, int64_t n_other_rows);
    std::vector<Candidate> offer(std::vector<Drafting> & texts);
    void choose(std::vector<Drafting> & texts, int64_t n_other_rows);
    void ask_chosen(size_t drafter, std::vector<Drafting> & texts, const std::vector<Choice> & choices);
    void ask(size_t drafter, const std::vector<DraftRequest> & requests);

    Model & target_;
    const Vocabulary & vocabulary_;
    std::vector<Text> texts_;
    std::vector<BatchDrafter> drafters_;
    FixedPolicy fixed_;
    std::unique_ptr<Governor> governor_; // keeps what it has learned while the drafters stay the same
    Policy * policy_ = &fixed_;
    int32_t n_chunk_;
    int64_t n_begun_ = 0, n_steps_ = 0;
    bool has_freed_ = false; // a text ended since the last one had to wait
    bool can_share_ = true;  // until the target refuses
    std::vector<Progress> progress_;
};

} // namespace pyfly
