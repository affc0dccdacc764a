#include "drafting.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <string>

#include "bounded_loop.h"
#include "error.h"
#include "stopwatch.h"

namespace pyfly {

namespace {

// Whether the request must not draft from earlier answers: drafts can change its own (where they are drawn, even
// without loss), and nobody has said that earlier ones may.
bool is_independent(const RequestConfig & config) {
    return (!config.gate.is_exact() || config.gate.draws()) && config.follows_answers == 0;
}

} // namespace

void Drafting::require_draft_max(int32_t k) const {
    if (k < 0 || k > target_.n_batch() - 1) {
        throw Error(PYFLY_STATUS_INVALID,
                    "{draft_max} is " + std::to_string(k) + ", but one batch of " + std::to_string(target_.n_batch()) +
                        " tokens holds the last token and the draft; keep {draft_max} under {n_batch}");
    }
}

std::vector<int32_t> Drafting::draft_max(const int32_t * draft_max) const {
    std::vector<int32_t> out;
    for (size_t i = 0; i < drafters_.size(); i++) {
        out.push_back(draft_max != nullptr ? draft_max[i] : drafters_[i].draft_max);
    }
    return out;
}

void Drafting::configure(bool is_adaptive, std::vector<BatchDrafter> drafters) {
    if (drafters.size() > PYFLY_MAX_DRAFTERS) {
        throw Error(PYFLY_STATUS_INVALID,
                    "at most " + std::to_string(PYFLY_MAX_DRAFTERS) + " drafters can be combined");
    }
    const int32_t n_slots = static_cast<int32_t>(requests_.size());
    for (const BatchDrafter & d : drafters) {
        require_draft_max(d.draft_max);
        if (d.drafter->n_slots() < n_slots) {
            throw Error(PYFLY_STATUS_INVALID, "a drafter for " + std::to_string(d.drafter->n_slots()) +
                                                  " requests cannot serve " + std::to_string(n_slots) +
                                                  "; open one for this target");
        }
    }
    const bool is_same =
        governor_ != nullptr && std::equal(drafters.begin(), drafters.end(), drafters_.begin(), drafters_.end(),
                                           [](const auto & a, const auto & b) { return a.drafter == b.drafter; });
    if (!is_same) {
        governor_ = std::make_unique<Governor>();
        for (size_t i = 0; i < drafters.size(); i++) {
            governor_->expect(static_cast<int32_t>(i), drafters[i].drafter->is_free(),
                              drafters[i].drafter->expected_cost(), drafters[i].drafter->drafts_at_once());
        }
    }
    if (is_adaptive) {
        policy_ = governor_.get();
    } else {
        policy_ = &fixed_;
    }
    drafters_ = std::move(drafters);
}

void Drafting::expect_costs(const MeasuredCosts & costs) {
    if (governor_ == nullptr) {
        throw Error(PYFLY_STATUS_INVALID, "configure the batch before it is told what drafting costs");
    }
    const auto require = [&](bool is_possible, double us) {
        if (!is_possible || !(us > 0.0) || !std::isfinite(us)) {
            throw Error(PYFLY_STATUS_INVALID,
                        "costs must be of sizes >= 1 and in microseconds > 0, of drafters that the "
                        "batch was configured with; measure them again");
        }
    };
    const auto is_drafter = [&](int32_t d) { return d >= 0 && static_cast<size_t>(d) < drafters_.size(); };
    for (const auto & rows : costs.target) {
        require(rows.n >= 1, rows.us);
    }
    for (const auto & draft : costs.drafts) {
        require(is_drafter(draft.drafter) && draft.n_requests >= 1 && draft.k >= 1, draft.us);
    }
    for (const auto & catch_up : costs.catch_up) {
        require(is_drafter(catch_up.drafter), catch_up.us);
    }
    if (!(costs.change_us >= 0.0) || !std::isfinite(costs.change_us)) {
        throw Error(PYFLY_STATUS_INVALID,
                    "the price of a change of a batch's size must be >= 0; measure the costs again");
    }
    governor_->expect_costs(costs);
}

void Drafting::require_rows(const RequestConfig & config) const {
    const bool must_draw = config.gate.draws();
    bool is_asked = false, has_rows = false;
    for (size_t d = 0; d < drafters_.size(); d++) {
        const bool may_draft = config.draft_max[d] > 0;
        is_asked = is_asked || may_draft;
        const Drafter & drafter = *drafters_[d].drafter;
        has_rows = has_rows || (may_draft && drafter.has_rows() && (drafter.draws() || !must_draw));
    }
    if (config.gate.needs_draft_rows() && is_asked && !has_rows) {
        throw Error(PYFLY_STATUS_INVALID,
                    std::string("the gate compares the draft's distribution with the target's, and this drafter ") +
                        (must_draw ? "draws its tokens from none" : "has none") +
                        "; use a draft model or a head, or another gate");
    }
}

int32_t Drafting::n_running() const {
    return static_cast<int32_t>(std::count_if(requests_.begin(), requests_.end(),
                                              [](const Request & request) { return request.is_running(); }));
}

// Tokens of the prompt that a drafter which will be asked soon has to evaluate.
size_t Drafting::n_behind(const Request & request, size_t drafter) const {
    const int32_t k = request.sequence.config().draft_max[drafter];
    if (request.schedule.is_prepared || k < 1 || !target_.can_rewind()) {
        return 0;
    }
    const size_t n = drafters_[drafter].drafter->n_behind(request.slot(), request.sequence.transcript().history());
    const bool pays = n > 0 && policy_->pays_to_follow(request.slot(), static_cast<int32_t>(drafter), k, n_running(),
                                                       static_cast<int64_t>(n));
    return pays ? n : 0;
}

size_t Drafting::n_behind(const Request & request) const {
    size_t n = 0;
    for (size_t d = 0; d < drafters_.size(); d++) {
        n += n_behind(request, d);
    }
    return n;
}

size_t Drafting::n_reusable(const Request & request, size_t n) const {
    const size_t n_held = n;
    for (size_t d = 0; d < drafters_.size(); d++) {
        if (request.sequence.config().draft_max[d] > 0 && target_.can_rewind()) {
            n = std::min(
                n, drafters_[d].drafter->n_reusable(request.slot(), request.sequence.transcript().history(), n_held));
        }
    }
    return n;
}

void Drafting::forget(int32_t slot) {
    for (const BatchDrafter & d : drafters_) {
        d.drafter->forget(slot);
    }
}

void Drafting::share(const Request & from, const Request & to) {
    for (size_t d = 0; d < drafters_.size(); d++) {
        if (to.sequence.config().draft_max[d] > 0) {
            drafters_[d].drafter->share(from.slot(), to.slot(), to.sequence.transcript().history());
        }
    }
}

bool Drafting::drafts_behind_prompt(const Request & request) const {
    for (size_t d = 0; d < drafters_.size(); d++) {
        const int32_t k = request.sequence.config().draft_max[d];
        if (k > 0 && drafters_[d].drafter->reads_target() && target_.can_rewind() &&
            policy_->pays_to_follow(request.slot(), static_cast<int32_t>(d), k, n_running(), 1)) {
            return true;
        }
    }
    return false;
}

// One batch of what a drafter has missed of the request. Returns how many tokens are left.
size_t Drafting::catch_up(const Request & request, size_t drafter, size_t n_most) {
    Drafter & d = *drafters_[drafter].drafter;
    const std::vector<int32_t> & history = request.sequence.transcript().history();
    const int64_t n_before = static_cast<int64_t>(d.n_behind(request.slot(), history));
    size_t n_left = 0;
    int64_t us = 0;
    {
        const Stopwatch stopwatch(us);
        n_left = d.prepare(request.slot(), history, n_most);
    }
    policy_->observe_catch_up(static_cast<int32_t>(drafter), n_before - static_cast<int64_t>(n_left),
                              static_cast<double>(us));
    return n_left;
}

// One batch of what the first drafter that is behind has missed of the prompt.
void Drafting::prepare(Request & request, size_t n_most) {
    int64_t us = 0;
    try {
        const Stopwatch stopwatch(us);
        for (size_t d = 0; d < drafters_.size(); d++) {
            if (n_behind(request, d) > 0) {
                catch_up(request, d, n_most);
                break;
            }
        }
    } catch (const std::exception &) {
        fail(request);
    }
    request.sequence.stats().us_prefill += us;
    request.sequence.stats().us_catch_up += us;
}

// What each request may choose from. Where something is chosen (and not just asked for in turn), free drafters are
// asked first.
std::vector<Candidate> Drafting::offer(Turns & turns) {
    std::vector<std::vector<int32_t>> k_max(turns.size(), std::vector<int32_t>(drafters_.size(), 0));
    for (size_t i = 0; i < turns.size(); i++) {
        const Request & request = *turns[i].request;
        const int64_t limit = request.sequence.draft_limit(request.schedule.n_room);
        for (size_t d = 0; d < drafters_.size(); d++) {
            const int32_t k = std::min(request.sequence.config().draft_max[d], drafters_[d].drafter->draft_most());
            k_max[i][d] = static_cast<int32_t>(std::clamp<int64_t>(limit, 0, k));
        }
        turns[i].free.resize(drafters_.size());
    }
    for (size_t d = 0; d < drafters_.size() && !policy_->asks_the_next(); d++) {
        if (!drafters_[d].drafter->is_free()) {
            continue;
        }
        std::vector<DraftRequest> requests;
        for (size_t i = 0; i < turns.size(); i++) {
            if (k_max[i][d] > 0) {
                const Sequence & sequence = turns[i].request->sequence;
                const GateExpression & gate = sequence.config().gate;
                requests.push_back({turns[i].request->slot(),
                                    &sequence.transcript().history(),
                                    k_max[i][d],
                                    &turns[i].free[d],
                                    gate.needs_draft_rows(),
                                    {},
                                    {},
                                    is_independent(sequence.config()),
                                    sequence.config().owner});
            }
        }
        ask(d, requests);
        for (size_t i = 0; i < turns.size(); i++) {
            k_max[i][d] = static_cast<int32_t>(turns[i].free[d].tokens.size());
        }
    }
    std::vector<Candidate> candidates;
    for (size_t i = 0; i < turns.size(); i++) {
        Request & request = *turns[i].request;
        Candidate candidate = {request.slot(), {}};
        try {
            for (size_t d = 0; d < drafters_.size() && request.sequence.is_active(); d++) {
                if (k_max[i][d] > 0) {
                    const std::vector<int32_t> & history = request.sequence.transcript().history();
                    const size_t n = drafters_[d].drafter->n_behind(request.slot(), history);
                    candidate.offers.push_back({static_cast<int32_t>(d), k_max[i][d], turns[i].free[d].proposal_class,
                                                static_cast<int64_t>(n)});
                }
            }
        } catch (const std::exception &) {
            fail(request);
            candidate.offers.clear();
        }
        candidates.push_back(std::move(candidate));
    }
    return candidates;
}

// After the exception that is being handled. That a drafter's own cache is full says nothing of the request's context.
void Drafting::fail(Request & request) {
    request.stop(true);
    if (request.failure.status == PYFLY_STATUS_CONTEXT_FULL) {
        request.failure.status = PYFLY_STATUS_NATIVE;
    }
}

// Asks a drafter. Where that fails, every request alone, so that only the one that causes it stops.
void Drafting::ask(size_t drafter, const std::vector<DraftRequest> & requests) {
    if (requests.empty()) {
        return;
    }
    try {
        drafters_[drafter].drafter->propose(requests);
        for (const DraftRequest & request : requests) {
            for (const int32_t token : request.out->tokens) {
                if (token < 0 || token >= target_.n_vocab()) {
                    throw Error(PYFLY_STATUS_INVALID, "the drafter proposed token " + std::to_string(token) +
                                                          ", which is outside the target's vocabulary of " +
                                                          std::to_string(target_.n_vocab()) +
                                                          "; fix or remove the drafter");
                }
            }
        }
    } catch (const std::exception &) {
        if (requests.size() == 1) {
            requests.front().out->tokens.clear();
            fail(requests_[static_cast<size_t>(requests.front().slot)]);
            return;
        }
        for (const DraftRequest & request : requests) {
            *request.out = {};
            ask(drafter, {request});
        }
    }
}

// Asks one drafter on behalf of the requests that chose it.
void Drafting::ask_chosen(size_t drafter, Turns & turns, const std::vector<Choice> & choices) {
    const bool is_governed = !policy_->asks_the_next();
    std::vector<DraftRequest> requests;
    std::vector<int32_t> asked;
    for (size_t i = 0; i < turns.size(); i++) {
        Turn & d = turns[i];
        Request & request = *d.request;
        if (choices[i].drafter != static_cast<int32_t>(drafter) || choices[i].k < 1 || !request.sequence.is_active()) {
            continue;
        }
        d.draft.drafter = choices[i].drafter;
        request.learning.drafted.n_asked = 0;
        if (is_governed && drafters_[drafter].drafter->is_free()) {
            d.proposal = std::move(d.free[drafter]);
            d.proposal.tokens.resize(static_cast<size_t>(choices[i].k));
            continue;
        }
        try {
            if (is_governed) {
                until_none_is_left([&] { return catch_up(request, drafter); });
            }
        } catch (const std::exception &) {
            fail(request);
            continue;
        }
        request.learning.drafted.n_asked = is_governed ? choices[i].k : 0;
        const GateExpression & gate = request.sequence.config().gate;
        requests.push_back({request.slot(), &request.sequence.transcript().history(), choices[i].k, &d.proposal,
                            gate.needs_draft_rows(), request.sequence.draw_draft(),
                            policy_->stop(choices[i].drafter, choices[i].k), is_independent(request.sequence.config()),
                            request.sequence.config().owner});
    }
    int64_t us = 0;
    {
        const Stopwatch stopwatch(us);
        if (drafters_[drafter].drafter->can_be_measured()) {
            ask(drafter, requests);
        } else { // the caller's own: what it raises is of one request
            for (const DraftRequest & request : requests) {
                ask(drafter, {request});
            }
        }
    }
    for (const DraftRequest & request : requests) {
        const size_t n_weighed = request.out->confidence.size();
        const bool is_shorter = n_weighed > 0 && !drafters_[drafter].drafter->drafts_at_once();
        asked.push_back(is_shorter ? static_cast<int32_t>(n_weighed) : request.n_max);
    }
    if (!requests.empty()) {
        policy_->observe_draft(static_cast<int32_t>(drafter), asked, static_cast<double>(us));
    }
}

// What the policy chooses. Where it only names who is asked first, a request that got nothing turns to the next
// drafter.
void Drafting::choose(Turns & turns) {
    std::vector<Candidate> candidates = offer(turns);
    bool asks_on = true;
    while (asks_on) {
        const std::vector<Choice> choices = policy_->choose(candidates);
        for (size_t d = 0; d < drafters_.size(); d++) {
            ask_chosen(d, turns, choices);
        }
        asks_on = false;
        for (size_t i = 0; i < turns.size() && policy_->asks_the_next(); i++) {
            std::vector<Offer> & offers = candidates[i].offers;
            if (!turns[i].proposal.tokens.empty()) {
                offers.clear();
            } else if (!offers.empty()) {
                offers.erase(offers.begin());
            }
            if (!offers.empty()) {
                turns[i].proposal = {}; // what a drafter leaves that has no tokens is not the next one's
                asks_on = true;
            }
        }
    }
    for (Turn & d : turns) {
        d.draft.tokens = std::move(d.proposal.tokens);
        d.draft.rows = std::move(d.proposal.rows);
        d.draft.drawn = std::move(d.proposal.drawn);
        d.request->learning.drafted.proposal_class = d.proposal.proposal_class;
        d.request->learning.drafted.confidence = std::move(d.proposal.confidence);
        d.request->learning.drafted.dropped = d.proposal.dropped;
        d.request->learning.drafted.is_from_answers = d.proposal.is_from_answers;
        for (size_t i = 0; i < d.free.size(); i++) {
            d.request->learning.outcomes.follow(static_cast<int32_t>(i), std::move(d.free[i]),
                                                d.request->sequence.transcript().n());
        }
    }
}

std::vector<Draft> Drafting::draft(const std::vector<Request *> & requests) {
    Turns turns;
    for (Request * request : requests) {
        request->learning.drafted = {};
        turns.push_back({request, {}, {}, {}});
    }
    std::vector<Draft> drafts(requests.size());
    if (drafters_.empty() || requests.empty()) {
        return drafts;
    }
    int64_t us = 0;
    {
        const Stopwatch stopwatch(us);
        choose(turns);
    }
    for (size_t i = 0; i < turns.size(); i++) {
        requests[i]->sequence.stats().us_draft += us / static_cast<int64_t>(requests.size());
        drafts[i] = std::move(turns[i].draft);
    }
    return drafts;
}

void Drafting::observe(const std::vector<Span> & spans) {
    for (size_t d = 0; d < drafters_.size() && target_.can_rewind(); d++) {
        std::vector<bool> wanted;
        for (const Span & span : spans) {
            const Sequence & sequence = requests_[static_cast<size_t>(span.sequence)].sequence;
            const std::vector<int32_t> & k = sequence.config().draft_max; // older than the drafters in a failed request
            wanted.push_back(sequence.has_request() && d < k.size() && k[d] > 0);
        }
        try {
            drafters_[d].drafter->observe(target_, spans, wanted);
        } catch (const Error & e) {
            // That a drafter's own cache is full is nothing the target could make room for.
            throw Error(e.status() == PYFLY_STATUS_CONTEXT_FULL ? PYFLY_STATUS_NATIVE : e.status(), e.what());
        }
    }
}

void Drafting::end_request(const Request & request, size_t n) {
    const std::vector<int32_t> & history = request.sequence.transcript().history();
    const std::vector<int32_t> given(history.begin(), history.begin() + static_cast<std::ptrdiff_t>(n));
    for (const BatchDrafter & d : drafters_) {
        d.drafter->ended(given, request.n_prompt, request.sequence.config().owner);
    }
}

// The first n_right tokens of the draft were right. The target's token in place of a dropped one shows whether that
// was right, too.
void Drafting::learn_confidence(const Request & request, size_t n_right) {
    const Draft & draft = request.sequence.draft();
    const std::vector<int32_t> & history = request.sequence.transcript().history();
    const size_t n = draft.tokens.size(), at = request.sequence.draft_begin() + n_right;
    const int32_t next = n_right < n ? draft.tokens[n_right] : request.learning.drafted.dropped;
    const bool is_known = next >= 0 && at < history.size(), is_right = is_known && history[at] == next;
    policy_->observe_confidence(request.slot(), draft.drafter, request.learning.drafted.confidence,
                                request.learning.drafted.n_asked, static_cast<int32_t>(n), n_right + (is_right ? 1 : 0),
                                is_known && !is_right);
}

void Drafting::learn(Request & request) {
    const std::vector<int32_t> & history = request.sequence.transcript().history();
    const Draft & draft = request.sequence.draft();
    const bool has_confidence = !request.learning.drafted.confidence.empty();
    const size_t n_right = request.learning.outcomes.learn(
        *policy_, request.slot(), draft.drafter, request.learning.drafted.proposal_class, draft.tokens,
        request.learning.drafted.n_asked, has_confidence, request.sequence.draft_begin(), history,
        vocabulary_.is_eog(history.back()));
    if (has_confidence) {
        learn_confidence(request, n_right);
    }
    request.sequence.stats().accepted_from_answers +=
        request.learning.drafted.is_from_answers ? static_cast<int64_t>(n_right) : 0;
}

} // namespace pyfly
