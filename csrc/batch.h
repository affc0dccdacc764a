// Several requests on one target: what they want evaluated goes to it together, and what came of it goes back to each.
// No llama.h.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "drafting.h"
#include "evaluation.h"
#include "request.h"

namespace pyfly {

// A request has a slot while it runs: a sequence of the target and a place in every drafter. What is left in a slot
// when its request ended serves the next request of the same owner that begins alike.
//
// A request that joins evaluates its prompt in chunks, between which the others go on. Requests of one owner that begin
// alike share what is evaluated of it. When the target's cache is full, the youngest request waits: what it had is
// forgotten and evaluated again when another request has ended; no younger one overtakes it. Of requests whose batch
// fails, only the one stops that cannot be evaluated alone.
class Batch {
  public:
    // Target and vocabulary are borrowed. As many slots as the target has sequences.
    Batch(Model & target, const Vocabulary & vocabulary);

    Batch(const Batch &) = delete;
    Batch & operator=(const Batch &) = delete;

    // What all requests draft with, see pyfly_batch_configure. Throws Error(PYFLY_STATUS_INVALID) while one runs.
    void configure(bool is_adaptive, std::vector<BatchDrafter> drafters, int32_t n_chunk, int64_t us_chunk);

    int32_t n_slots() const { return static_cast<int32_t>(requests_.size()); }
    const Sequence & at(int32_t slot) const { return requests_[static_cast<size_t>(slot)].sequence; }

    // The free slot that this request of an owner continues; else an empty one, else the one that was used longest ago,
    // which takes over what others hold of its beginning. -1 if none is free.
    int32_t find_slot(const int32_t * history, size_t n_history, int32_t owner) const;

    // See pyfly_batch_expect: of the drafters that were configured.
    void expect_costs(const MeasuredCosts & costs) { drafting_.expect_costs(costs); }

    // What measuring.h needs of it, between requests.
    void require_idle() const; // throws Error(PYFLY_STATUS_INVALID) while a request runs
    Model & target() { return target_; }
    const std::vector<BatchDrafter> & drafters() const { return drafting_.drafters(); }
    Memory & memory(int32_t slot) { return request_in(slot).sequence.memory(); }

    // For RequestConfig: one for each drafter, or null for what the drafters were given.
    std::vector<int32_t> draft_max(const int32_t * k) const { return drafting_.draft_max(k); }

    // See Sequence. Throws Error(PYFLY_STATUS_INVALID) for a draft_max outside 0..n_batch - 1.
    void begin(int32_t slot, RequestConfig config, std::vector<int32_t> history, std::optional<size_t> n_evaluated,
               std::unique_ptr<Sampler> sampler);
    void resume(int32_t slot, size_t n_keep, const int32_t * tokens, size_t n_tokens);
    void park(int32_t slot, size_t n_keep) { request_in(slot).sequence.park(n_keep); }
    void end(int32_t slot, size_t n_keep);

    // How many more tokens are wanted of a request, >= 1. Counts down with what is committed, never below 1.
    void want(int32_t slot, int32_t n_room);

    // Tokens of the prompt, or of what has to be evaluated again, before the request's next step; 0: the next iteration
    // brings it.
    size_t n_left(int32_t slot) const;

    // An iteration: every running request goes on, with a chunk of its prompt or with a step, unless it waits.
    struct Progress {
        int32_t slot;
        bool is_waiting;
        bool is_step;    // it has taken what came of a step
        Failure failure; // the request stopped in this iteration; only end() may follow
    };
    const std::vector<Progress> & step();

    // Why the request in this slot stopped in the last iteration, if it did.
    const Failure & failure(int32_t slot) const { return request_in(slot).failure; }

    void reset_stats(int32_t slot) { request_in(slot).sequence.reset_stats(); }
    const Governor * governor() const { return drafting_.governor(); }

  private:
    Request & request_in(int32_t slot) { return requests_[static_cast<size_t>(slot)]; }
    const Request & request_in(int32_t slot) const { return requests_[static_cast<size_t>(slot)]; }
    std::vector<Request *> running_by_age();
    bool delays_another(const Request & of) const;
    size_t n_with_step(const Request & request) const;
    bool may_return(const Request & request) const;
    size_t n_continued(const Request & of, const int32_t * history, size_t n_history) const;
    bool waits_for_prefix(Request & request);

    // What the requests do in an iteration.
    struct Parts {
        std::vector<Request *> joining; // a part of their prompt is evaluated
        std::vector<Request *> steps;
        size_t n_chunk = 0; // what is left of a chunk for prompts
        bool is_older_waiting = false;
    };
    void assign(Request & request, Parts & parts);
    Plans plan_prompts(const std::vector<Request *> & joining, size_t n_most);
    Plans plan_steps(const std::vector<Request *> & requests);

    Model & target_;
    std::vector<Request> requests_;
    Drafting drafting_;
    PromptChunks chunks_;
    Evaluation evaluation_;
    int64_t n_begun_ = 0, n_iterations_ = 0;
    bool has_freed_ = false; // a request ended since the last iteration
    std::vector<Progress> progress_;
};

} // namespace pyfly
