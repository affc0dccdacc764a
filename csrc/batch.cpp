#include "batch.h"

#include <algorithm>
#include <exception>

#include "common_prefix.h"
#include "error.h"

namespace pyfly {

namespace {

constexpr size_t worth_sharing = 16; // tokens of a common beginning that are worth a copy, or waiting for

} // namespace

Batch::Batch(Model & target, const Vocabulary & vocabulary)
    : target_(target), drafting_(target, vocabulary, requests_), evaluation_(target, requests_, drafting_, chunks_) {
    chunks_.configure(target.n_batch(), 0);
    for (int32_t slot = 0; slot < target.n_sequences(); slot++) {
        requests_.push_back(
            {Sequence(target, vocabulary, slot, [this](const std::vector<Span> & s) { evaluation_.evaluate(s); })});
    }
}

void Batch::require_idle() const {
    if (std::any_of(requests_.begin(), requests_.end(),
                    [](const Request & request) { return request.sequence.is_active(); })) {
        throw Error(PYFLY_STATUS_INVALID, "gate, window and drafter can be changed between requests, not during one");
    }
}

void Batch::configure(bool is_adaptive, std::vector<BatchDrafter> drafters, int32_t n_chunk, int64_t us_chunk) {
    require_idle();
    if (n_chunk < 0) {
        throw Error(PYFLY_STATUS_INVALID, "n_chunk must be >= 0, not " + std::to_string(n_chunk));
    }
    if (us_chunk < 0) {
        throw Error(PYFLY_STATUS_INVALID, "us_chunk must be >= 0, not " + std::to_string(us_chunk));
    }
    drafting_.configure(is_adaptive, std::move(drafters));
    chunks_.configure(n_chunk > 0 ? std::min(n_chunk, target_.n_batch()) : target_.n_batch(), us_chunk);
}

// What a request in this slot would have of it, if it may go there: because next to nothing is lost, or because it
// continues the conversation whose answer is lost. Else another one that comes back would have to be read again, where
// it costs nothing to take what both begin with along to another slot. Where it cannot be taken along, half of the
// request is worth more than what is lost.
size_t Batch::n_continued(const Request & of, const int32_t * history, size_t n_history) const {
    const Memory & memory = of.sequence.memory();
    const size_t n = memory.n_common(history, n_history);
    const bool loses_little = memory.n() < n + worth_sharing;
    const bool continues = n >= std::max(worth_sharing, of.sequence.n_messages());
    return loses_little || continues || (!target_.can_copy() && 2 * n >= n_history) ? n : 0;
}

int32_t Batch::find_slot(const int32_t * history, size_t n_history, int32_t owner) const {
    int32_t best = -1;
    size_t n_best = 0;
    for (int32_t slot = 0; slot < n_slots(); slot++) {
        const Request & request = request_in(slot);
        if (request.sequence.has_request()) {
            continue;
        }
        const size_t n = request.owner() == owner ? n_continued(request, history, n_history) : 0;
        const auto is_better = [&](const Request & other) { // among equals the one that is missed least
            return std::make_pair(request.sequence.memory().n() > 0, request.schedule.used) <
                   std::make_pair(other.sequence.memory().n() > 0, other.schedule.used);
        };
        if (best < 0 || n > n_best || (n == n_best && is_better(request_in(best)))) {
            best = slot;
            n_best = n;
        }
    }
    return best;
}

void Batch::begin(int32_t slot, RequestConfig config, std::vector<int32_t> history, std::optional<size_t> n_evaluated,
                  std::unique_ptr<Sampler> sampler) {
    Request & request = request_in(slot);
    for (const int32_t k : config.draft_max) {
        drafting_.require_draft_max(k);
    }
    drafting_.require_rows(config);
    const bool had_request = request.sequence.has_request();
    const size_t n_prompt = history.size();
    // An owner who asks is not to learn, by how long it takes, that another one has asked the same.
    const bool is_others = request.owner() != config.owner;
    n_evaluated = is_others && !n_evaluated ? 0 : n_evaluated;
    request.sequence.begin(std::move(config), std::move(history), n_evaluated, std::move(sampler));
    if (!target_.is_limited()) { // which could not go back by a token or two
        request.sequence.memory().truncate(drafting_.n_reusable(request, request.sequence.memory().n()));
    }
    has_freed_ = has_freed_ || had_request; // there may be room for one that waits
    request.schedule.order = n_begun_++;
    request.n_prompt = n_prompt;
    request.schedule.n_room = Model::unlimited;
    request.begin();
    if (is_others) {
        drafting_.forget(slot);
    }
    drafting_.begin_request(slot);
}

void Batch::resume(int32_t slot, size_t n_keep, const int32_t * tokens, size_t n_tokens) {
    Request & request = request_in(slot);
    const bool is_waiting = request.schedule.is_waiting; // nobody overtakes
    request.sequence.resume(n_keep, tokens, n_tokens);
    request.begin();
    request.schedule.is_waiting = is_waiting;
    drafting_.begin_request(slot);
}

void Batch::end(int32_t slot, size_t n_keep) {
    Request & request = request_in(slot);
    request.schedule.used = ++n_iterations_;
    request.schedule.is_waiting = false;
    if (request.sequence.has_request()) {
        has_freed_ = true;
        const size_t n_committed = request.sequence.transcript().n_committed();
        drafting_.end_request(request, n_keep < n_committed ? n_keep + 1 : n_committed);
    }
    request.sequence.end(n_keep);
}

void Batch::want(int32_t slot, int32_t n_room) {
    if (n_room < 1) {
        throw Error(PYFLY_STATUS_INVALID, "a step needs room for at least one token");
    }
    request_in(slot).schedule.n_room = n_room;
}

// Whether another request is in the middle of its steps: it is not to be delayed by more than a chunk.
bool Batch::delays_another(const Request & of) const {
    return std::any_of(requests_.begin(), requests_.end(),
                       [&](const Request & request) { return &request != &of && request.is_midway(); });
}

// Tokens that may go with a request's step.
size_t Batch::n_with_step(const Request & request) const {
    if (request.sequence.n_steps() == 0 && drafting_.drafts_behind_prompt(request)) {
        return 1;
    }
    return static_cast<size_t>(delays_another(request) ? chunks_.n() : target_.n_batch());
}

size_t Batch::n_left(int32_t slot) const {
    const Request & request = request_in(slot);
    if (!request.sequence.is_active()) {
        throw Error(PYFLY_STATUS_INVALID, "no sequence was begun");
    }
    const size_t n = request.sequence.n_left(n_with_step(request));
    return n > 0 ? n : drafting_.n_behind(request);
}

std::vector<Request *> Batch::running_by_age() {
    std::vector<Request *> requests;
    for (Request & request : requests_) {
        if (request.sequence.is_active()) {
            requests.push_back(&request);
        }
    }
    std::sort(requests.begin(), requests.end(),
              [](const Request * a, const Request * b) { return a->schedule.order < b->schedule.order; });
    return requests;
}

const std::vector<Batch::Progress> & Batch::step() {
    const std::vector<Request *> requests = running_by_age();
    if (requests.empty()) {
        throw Error(PYFLY_STATUS_INVALID, "no sequence was begun");
    }
    n_iterations_++;
    Parts parts;
    parts.n_chunk = static_cast<size_t>(chunks_.n());
    for (Request * request : requests) {
        try {
            assign(*request, parts);
        } catch (const std::exception &) {
            request->stop(true);
        }
    }
    has_freed_ = false;

    const bool is_chunked =
        !parts.steps.empty() || std::any_of(parts.joining.begin(), parts.joining.end(),
                                            [&](const Request * request) { return delays_another(*request); });
    const size_t n_most = is_chunked ? parts.n_chunk : static_cast<size_t>(target_.n_batch());
    const Plans prompts = plan_prompts(parts.joining, n_most);
    Plans plans = plan_steps(parts.steps);
    plans.insert(plans.end(), prompts.begin(), prompts.end());
    evaluation_.run(plans);

    progress_.clear();
    for (const Request * request : requests) {
        progress_.push_back(
            {request->slot(), request->schedule.is_waiting, request->schedule.has_had_step, request->failure});
    }
    return progress_;
}

// What a request does in this iteration: it waits, a part of its prompt is evaluated, its drafters catch up, or it has
// a step.
void Batch::assign(Request & request, Parts & parts) {
    request.failure = {};
    request.schedule.has_had_step = false;
    request.schedule.used = n_iterations_;
    request.sequence.begin_iteration();
    if (request.sequence.transcript().n() > static_cast<size_t>(target_.n_ctx())) {
        request.failure = {PYFLY_STATUS_CONTEXT_FULL, "the context of " + std::to_string(target_.n_ctx()) +
                                                          " tokens is full; raise {n_ctx} or start a new sequence"};
        return;
    }
    request.schedule.is_waiting =
        parts.is_older_waiting || (request.schedule.is_waiting && !may_return(request)); // nobody overtakes
    parts.is_older_waiting = request.schedule.is_waiting;
    if (request.schedule.is_waiting || waits_for_prefix(request)) {
        return;
    }
    const bool has_prompt = request.sequence.n_steps() == 0 && delays_another(request);
    if (request.sequence.n_left(has_prompt ? std::min(parts.n_chunk, n_with_step(request)) : n_with_step(request)) >
        0) {
        parts.joining.push_back(&request);
    } else if (const size_t n_behind = drafting_.n_behind(request); n_behind > 0) {
        if (!delays_another(request)) {
            drafting_.prepare(request, SIZE_MAX);
        } else if (parts.n_chunk > 0) {
            drafting_.prepare(request, std::max<size_t>(parts.n_chunk, 2));
            parts.n_chunk -= std::min(parts.n_chunk, n_behind);
        }
    } else {
        request.schedule.is_prepared = true;
        parts.steps.push_back(&request);
        parts.n_chunk -= has_prompt ? std::min(parts.n_chunk, request.sequence.n_unevaluated() - 1) : 0;
    }
}

// Drafts for these requests.
Plans Batch::plan_steps(const std::vector<Request *> & requests) {
    std::vector<Draft> drafts = drafting_.draft(requests);
    std::vector<Request *> rolled_back; // they draft again, from there
    Plans plans;
    for (size_t i = 0; i < requests.size(); i++) {
        Request & request = *requests[i];
        if (!request.is_running()) {
            continue; // its drafter failed, or it had to make room
        }
        if (drafts[i].tokens.empty() && request.sequence.be_silent()) {
            if (request.sequence.n_left(n_with_step(request)) == 0) {
                rolled_back.push_back(&request);
            }
            continue;
        }
        try {
            plans.push_back({&request, request.sequence.plan_step(std::move(drafts[i]))});
        } catch (const std::exception &) {
            if (current_failure().status == PYFLY_STATUS_CONTEXT_FULL && evaluation_.make_room()) {
                request.sequence.postpone(); // there is room in the next iteration
            } else {
                request.stop(false);
            }
        }
    }
    if (!rolled_back.empty()) {
        const Plans more = plan_steps(rolled_back);
        plans.insert(plans.end(), more.begin(), more.end());
    }
    return plans;
}

// ---- Prompts --------------------------------------------------------------------------------------------------------

// A request that has to wait comes back when another one has ended, or when nobody else is left.
bool Batch::may_return(const Request & of) const {
    return has_freed_ || std::none_of(requests_.begin(), requests_.end(),
                                      [&](const Request & request) { return &request != &of && request.is_running(); });
}

// A prompt that begins like another request of its owner takes over what is evaluated of it, unless its rows are
// wanted. Returns whether it waits for an older request that is about to evaluate more of what both begin with.
bool Batch::waits_for_prefix(Request & request) {
    const std::vector<int32_t> & history = request.sequence.transcript().history();
    Memory & memory = request.sequence.memory();
    // Rows that are wanted have to be evaluated.
    if (!target_.can_copy() || request.sequence.config().all_rows || memory.n() + worth_sharing >= history.size()) {
        return false;
    }
    const Request * longest = nullptr;
    size_t n_longest = memory.n() + worth_sharing;
    size_t n_parting = 0; // where it parts from the one that it has most in common with
    bool waits = false;
    for (Request & other : requests_) {
        if (&other == &request || other.owner() != request.owner()) {
            continue;
        }
        const Memory & held = other.sequence.memory();
        const size_t n = held.n_common(history.data(), history.size() - 1);
        n_parting = std::max(n_parting, n);
        if (const size_t n_shareable = held.n_shareable(n); n_shareable >= n_longest) {
            longest = &other;
            n_longest = n_shareable;
        }
        if (other.is_running() && other.schedule.order < request.schedule.order && other.sequence.n_steps() == 0) {
            const std::vector<int32_t> & theirs = other.sequence.transcript().history();
            const size_t n_most = std::min(history.size(), theirs.size()) - 1;
            const size_t n_alike = n_common(history.data(), n_most, theirs.data(), n_most);
            // It has begun to evaluate what both share, or is the first that will.
            if (n == held.n() && n_alike >= std::max(held.n(), memory.n()) + worth_sharing) {
                waits = other.sequence.keep_at(n_alike) || waits;
            }
        }
    }
    if (longest != nullptr && !waits && memory.share(longest->sequence.memory(), n_longest)) {
        drafting_.share(*longest, request);
    }
    if (n_parting > memory.n()) { // the next one that begins so need not read up to there
        request.sequence.keep_at(n_parting);
    }
    return waits;
}

// Chunks of prompts, the oldest request's first, at most n_most tokens together. Rows of a prompt last until the target
// evaluates again, so only one request's are kept in an iteration, and it comes last.
Plans Batch::plan_prompts(const std::vector<Request *> & joining, size_t n_most) {
    Plans plans, with_rows;
    for (Request * request : joining) {
        const bool keeps_rows = request->sequence.config().all_rows;
        if (n_most == 0 || (keeps_rows && !with_rows.empty())) {
            continue;
        }
        const Span & span = request->sequence.plan_prompt(n_most);
        n_most -= span.n;
        (keeps_rows ? with_rows : plans).push_back({request, span});
    }
    plans.insert(plans.end(), with_rows.begin(), with_rows.end());
    return plans;
}

} // namespace pyfly
