// Evaluating what several requests planned: as few batches of the target as it takes. A full cache and a batch that
// fails are dealt with here, so that no request suffers from another. No llama.h.
#pragma once

#include <optional>
#include <vector>

#include "drafting.h"
#include "policy/parts.h"
#include "policy/prompt_chunks.h"
#include "request.h"

namespace pyfly {

// What a request wants evaluated in an iteration.
struct Plan {
    Request * request;
    Span span;
};
using Plans = std::vector<Plan>;

class Evaluation {
  public:
    // All borrowed; a request for each of the target's sequences.
    Evaluation(Model & target, std::vector<Request> & requests, Drafting & drafting, PromptChunks & chunks)
        : target_(target), requests_(requests), drafting_(drafting), chunks_(chunks) {}

    // Evaluates spans in one batch and shows them to the drafters; throws Error.
    void evaluate(const std::vector<Span> & spans);

    // Evaluates the plans of running requests, in this order; each request takes what came of its own. Many steps may
    // go in several batches, see policy/parts.h.
    //
    // Where there is no room for all, make_room() makes some. A batch that fails otherwise is tried again in halves, so
    // that only the request stops that cannot be evaluated alone; where trying again has to wait for a later iteration,
    // because a recurrent memory was lost, the requests of that batch are evaluated alone until then.
    void run(const Plans & plans);

    // The target's cache is full: drops what an ended request left, the one that was used longest ago, or else lets the
    // youngest request wait, perhaps the one that asks. False, and nothing changed, if only one request runs.
    bool make_room();

  private:
    std::optional<int64_t> attempt(const Plans & plans);
    void try_again(const Plans & plans);
    void take(const Plans & plans, int64_t us);

    Model & target_;
    std::vector<Request> & requests_;
    Drafting & drafting_;
    PromptChunks & chunks_;
    BatchParts parts_;
};

} // namespace pyfly
