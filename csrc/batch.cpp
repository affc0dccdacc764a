#include "batch.h"

#include <algorithm>
#include <cmath>
#include <new>

#include "error.h"
#include "stopwatch.h"

namespace pyfly {

namespace {

constexpr size_t worth_sharing = 16; // tokens of a common beginning that are worth a copy, or waiting for

// What the exception that is being handled says.
Failure current_failure() {
    try {
        throw;
    } catch (const Error & e) {
        return {e.status(), e.what()};
    } catch (const std::bad_alloc &) {
        return {PYFLY_STATUS_NO_MEMORY, "out of memory"};
    } catch (const std::exception & e) {
        return {PYFLY_STATUS_INTERNAL, e.what()};
    }
}

} // namespace

Batch::Batch(Model & target, const Vocabulary & vocabulary)
    : target_(target), vocabulary_(vocabulary), n_chunk_(target.n_batch()) {
    for (int32_t slot = 0; slot < target.n_sequences(); slot++) {
        texts_.push_back({Sequence(target, vocabulary, slot, [this](const std::vector<Span> & s) { evaluate(s); })});
    }
}

void Batch::require_draft_max(int32_t k) const {
    if (k < 0 || k > target_.n_batch() - 1) {
        throw Error(PYFLY_STATUS_INVALID,
                    "draft_max is " + std::to_string(k) + ", but one batch of " + std::to_string(target_.n_batch()) +
                        " tokens holds the last token and the draft; keep draft_max under n_batch");
    }
}

std::vector<int32_t> Batch::draft_max(const int32_t * draft_max) const {
    std::vector<int32_t> out;
    for (size_t i = 0; i < drafters_.size(); i++) {
        out.push_back(draft_max != nullptr ? draft_max[i] : drafters_[i].draft_max);
    }
    return out;
}

void Batch::require_idle() const {
    if (std::any_of(texts_.begin(), texts_.end(), [](const Text & t) { return t.sequence.is_active(); })) {
        throw Error(PYFLY_STATUS_INVALID, "gate, window and drafter can be changed between requests, not during one");
    }
}

void Batch::configure(bool is_adaptive, std::vector<BatchDrafter> drafters, int32_t n_chunk) {
    require_idle();
    if (drafters.size() > PYFLY_MAX_DRAFTERS) {
        throw Error(PYFLY_STATUS_INVALID, "at most " + std::to_string(PYFLY_MAX_DRAFTERS) + " drafters work together");
    }
    if (n_chunk < 0) {
        throw Error(PYFLY_STATUS_INVALID, "n_chunk must be >= 0, not " + std::to_string(n_chunk));
    }
    for (const BatchDrafter & d : drafters) {
        require_draft_max(d.draft_max);
        if (d.drafter->n_texts() < n_slots()) {
            throw Error(PYFLY_STATUS_INVALID, "a drafter for " + std::to_string(d.drafter->n_texts()) +
                                                  " texts cannot serve " + std::to_string(n_slots()) +
                                                  "; open it beside this target");
        }
    }
    const bool is_same =
        governor_ != nullptr && std::equal(drafters.begin(), drafters.end(), drafters_.begin(), drafters_.end(),
                                           [](const auto & a, const auto & b) { return a.drafter == b.drafter; });
    if (!is_same) {
        governor_ = std::make_unique<Governor>();
        for (size_t i = 0; i < drafters.size(); i++) {
            governor_->expect(static_cast<int32_t>(i), drafters[i].drafter->is_free(),
                              drafters[i].drafter->expected_cost());
        }
    }
    if (is_adaptive) {
        policy_ = governor_.get();
    } else {
        policy_ = &fixed_;
    }
    drafters_ = std::move(drafters);
    n_chunk_ = n_chunk > 0 ? std::min(n_chunk, target_.n_batch()) : target_.n_batch();
}

void Batch::expect_costs(const MeasuredCosts & costs) {
    const auto require = [&](bool is_possible, double us) {
        if (!is_possible || !(us > 0.0) || !std::isfinite(us) || governor_ == nullptr) {
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
        require(is_drafter(draft.drafter) && draft.n_texts >= 1 && draft.k >= 1, draft.us);
    }
    for (const auto & catch_up : costs.catch_up) {
        require(is_drafter(catch_up.drafter), catch_up.us);
    }
    if (governor_ != nullptr) {
        governor_->expect_costs(costs);
    }
}

int32_t Batch::find_slot(const int32_t * history, size_t n_history) const {
    int32_t best = -1;
    size_t n_best = 0;
    for (int32_t slot = 0; slot < n_slots(); slot++) {
        const Text & t = text(slot);
        if (t.sequence.has_text()) {
            continue;
        }
        const Memory & memory = t.sequence.memory();
        const size_t n = memory.n_common(history, n_history);
        const auto is_better = [&](const Text & other) { // among equals the one that is missed least
            return std::make_pair(memory.n() > 0, t.used) < std::make_pair(other.sequence.memory().n() > 0, other.used);
        };
        if (best < 0 || n > n_best || (n == n_best && is_better(text(best)))) {
            best = slot;
            n_best = n;
        }
    }
    return best;
}

void Batch::begin(int32_t slot, RequestConfig config, std::vector<int32_t> history, std::optional<size_t> n_evaluated,
                  std::unique_ptr<Sampler> sampler) {
    Text & t = text(slot);
    for (const int32_t k : config.draft_max) {
        require_draft_max(k);
    }
    t.sequence.begin(std::move(config), std::move(history), n_evaluated, std::move(sampler));
    t.order = n_begun_++;
    t.n_room = Model::unlimited;
    t.is_prepared = t.is_waiting = t.is_held = t.is_suspect = false;
    t.failure = {};
    t.outcomes.begin();
    policy_->begin_text(slot);
}

void Batch::resume(int32_t slot, size_t n_keep, const int32_t * tokens, size_t n_tokens) {
    Text & t = text(slot);
    t.sequence.resume(n_keep, tokens, n_tokens);
    t.is_prepared = t.is_waiting = t.is_suspect = false;
    t.failure = {};
    t.outcomes.begin();
    policy_->begin_text(slot);
}

void Batch::end(int32_t slot, size_t n_keep) {
    Text & t = text(slot);
    has_freed_ = has_freed_ || t.sequence.has_text();
    t.used = ++n_steps_;
    t.is_waiting = false;
    if (t.sequence.has_text()) {
        policy_->end_text(slot);
    }
    t.sequence.end(n_keep);
}

void Batch::want(int32_t slot, int32_t n_room) {
    if (n_room < 1) {
        throw Error(PYFLY_STATUS_INVALID, "a round needs room for at least one token");
    }
    text(slot).n_room = n_room;
}

// Tokens that may go with a text's round: others that are in the middle of theirs are not to wait for more than a
// chunk.
size_t Batch::n_with_round(const Text & of) const {
    const bool is_alone = std::none_of(texts_.begin(), texts_.end(), [&](const Text & t) {
        return &t != &of && t.is_running() && t.sequence.n_rounds() > 0;
    });
    return static_cast<size_t>(is_alone ? target_.n_batch() : n_chunk_);
}

// Tokens of the prompt that a drafter which will be asked soon has to evaluate.
size_t Batch::n_behind(const Text & t, size_t drafter) const {
    const int32_t k = t.sequence.config().draft_max[drafter];
    if (t.is_prepared || k < 1 || !target_.can_rewind() ||
        !policy_->can_pay(t.slot(), static_cast<int32_t>(drafter), k)) {
        return 0;
    }
    return drafters_[drafter].drafter->n_behind(t.slot(), t.sequence.transcript().history());
}

size_t Batch::n_behind(const Text & t) const {
    size_t n = 0;
    for (size_t d = 0; d < drafters_.size(); d++) {
        n += n_behind(t, d);
    }
    return n;
}

size_t Batch::n_left(int32_t slot) const {
    const Text & t = text(slot);
    if (!t.sequence.is_active()) {
        throw Error(PYFLY_STATUS_INVALID, "no sequence was begun");
    }
    const size_t n = t.sequence.n_left(n_with_round(t));
    return n > 0 ? n : n_behind(t);
}

std::vector<Batch::Text *> Batch::running_by_age() {
    std::vector<Text *> texts;
    for (Text & t : texts_) {
        if (t.sequence.is_active()) {
            texts.push_back(&t);
        }
    }
    std::sort(texts.begin(), texts.end(), [](const Text * a, const Text * b) { return a->order < b->order; });
    return texts;
}

// The text stops because of the exception that is being handled.
void Batch::stop(Text & t, bool has_evaluated) {
    t.failure = current_failure();
    t.sequence.fail(has_evaluated);
}

const std::vector<Batch::Progress> & Batch::step() {
    const std::vector<Text *> texts = running_by_age();
    if (texts.empty()) {
        throw Error(PYFLY_STATUS_INVALID, "no sequence was begun");
    }
    n_steps_++;
    std::vector<Text *> joining;
    std::vector<Drafting> rounds;
    for (Text * t : texts) {
        t->failure = {};
        t->used = n_steps_;
        t->sequence.begin_step();
        if (t->is_held) {
            continue;
        }
        if (t->sequence.transcript().n() > static_cast<size_t>(target_.n_ctx())) {
            t->failure = {PYFLY_STATUS_CONTEXT_FULL, "the context of " + std::to_string(target_.n_ctx()) +
                                                         " tokens is full; raise n_ctx or start a new sequence"};
            continue;
        }
        t->is_waiting = t->is_waiting && !may_return(*t);
        if (t->is_waiting || waits_for_prefix(*t)) {
            continue;
        }
        if (t->sequence.n_left(n_with_round(*t)) > 0) {
            joining.push_back(t);
        } else if (n_behind(*t) > 0) {
            prepare(*t);
        } else {
            t->is_prepared = true;
            rounds.push_back({t, {}, {}, {}});
        }
    }
    has_freed_ = false;

    const Plans prompts = plan_prompts(joining, static_cast<size_t>(rounds.empty() ? target_.n_batch() : n_chunk_));
    int64_t n_other_rows = 0;
    for (const Plan & plan : prompts) {
        n_other_rows += static_cast<int64_t>(plan.span.n);
    }
    for (const Drafting & d : rounds) {
        const Sequence & sequence = d.text->sequence;
        n_other_rows += static_cast<int64_t>(sequence.transcript().n() - sequence.memory().n()) - 1;
    }
    draft(rounds, n_other_rows);
    Plans plans;
    for (Drafting & d : rounds) {
        if (!d.text->sequence.is_active()) {
            continue; // its drafter failed
        }
        try {
            plans.push_back({d.text, d.text->sequence.plan_round(std::move(d.draft))});
        } catch (...) {
            stop(*d.text, false);
        }
    }
    plans.insert(plans.end(), prompts.begin(), prompts.end());
    evaluate_parts(plans);

    progress_.clear();
    for (const Text * t : texts) {
        progress_.push_back({t->slot(), t->is_waiting, t->failure});
    }
    return progress_;
}

// ---- Prompts --------------------------------------------------------------------------------------------------------

// A text that has to wait comes back when another one has ended, or when nobody else is left.
bool Batch::may_return(const Text & of) const {
    return has_freed_ ||
           std::none_of(texts_.begin(), texts_.end(), [&](const Text & t) { return &t != &of && t.is_running(); });
}

// A prompt that begins like another text takes over what is evaluated of it, unless its rows are wanted. Returns whether
// it waits for an older text that is about to evaluate more of what both begin with.
bool Batch::waits_for_prefix(Text & t) {
    const std::vector<int32_t> & history = t.sequence.transcript().history();
    Memory & memory = t.sequence.memory();
    if (!can_share_ || n_slots() == 1 || t.sequence.config().all_rows || memory.n() + worth_sharing >= history.size()) {
        return false;
    }
    const Memory * longest = nullptr;
    size_t n_longest = memory.n() + worth_sharing;
    bool waits = false;
    for (const Text & other : texts_) {
        if (&other == &t) {
            continue;
        }
        const Memory & held = other.sequence.memory();
        const size_t n = held.n_common(history.data(), history.size() - 1);
        if (n >= n_longest) {
            longest = &held;
            n_longest = n;
        }
        if (other.is_running() && other.order < t.order && other.sequence.n_rounds() == 0) {
            const std::vector<int32_t> & theirs = other.sequence.transcript().history();
            const size_t n_most = std::min(history.size(), theirs.size()) - 1;
            const size_t n_common = static_cast<size_t>(
                std::mismatch(history.begin(), history.begin() + static_cast<std::ptrdiff_t>(n_most), theirs.begin())
                    .first -
                history.begin());
            // It has begun to evaluate what both share, or is the first that will.
            waits = waits || (n == held.n() && n_common >= std::max(held.n(), memory.n()) + worth_sharing);
        }
    }
    if (longest != nullptr && !waits) {
        can_share_ = memory.share(*longest, n_longest);
    }
    return waits;
}

// One batch of what a drafter has missed of the text. Returns how many tokens are left.
size_t Batch::catch_up(const Text & t, size_t drafter) {
    Drafter & d = *drafters_[drafter].drafter;
    const std::vector<int32_t> & history = t.sequence.transcript().history();
    const int64_t n_before = static_cast<int64_t>(d.n_behind(t.slot(), history));
    size_t n_left = 0;
    int64_t us = 0;
    {
        const Stopwatch stopwatch(us);
        n_left = d.prepare(t.slot(), history);
    }
    policy_->observe_catch_up(static_cast<int32_t>(drafter), n_before - static_cast<int64_t>(n_left),
                              static_cast<double>(us));
    return n_left;
}

// One batch of what the first drafter that is behind has missed of the prompt.
void Batch::prepare(Text & t) {
    const Stopwatch stopwatch(t.sequence.stats().us_prefill);
    try {
        for (size_t d = 0; d < drafters_.size(); d++) {
            if (n_behind(t, d) > 0) {
                catch_up(t, d);
                return;
            }
        }
    } catch (...) {
        stop(t, true);
    }
}

// Chunks of prompts, the oldest text's first, at most n_most tokens together. Rows of a prompt last until the target
// evaluates again, so only one text's are kept in a step, and it comes last.
Batch::Plans Batch::plan_prompts(const std::vector<Text *> & joining, size_t n_most) {
    Plans plans, with_rows;
    for (Text * t : joining) {
        const bool keeps_rows = t->sequence.config().all_rows;
        if (n_most == 0 || (keeps_rows && !with_rows.empty())) {
            continue;
        }
        const Span & span = t->sequence.plan_prompt(n_most);
        n_most -= span.n;
        (keeps_rows ? with_rows : plans).push_back({t, span});
    }
    plans.insert(plans.end(), with_rows.begin(), with_rows.end());
    return plans;
}

// ---- Evaluating -----------------------------------------------------------------------------------------------------

void Batch::evaluate(const std::vector<Span> & spans) {
    target_.evaluate(spans);
    for (size_t i = 0; i < drafters_.size() && target_.can_rewind(); i++) {
        const bool is_used = std::any_of(texts_.begin(), texts_.end(), [&](const Text & t) {
            return t.sequence.has_text() && t.sequence.config().draft_max[i] > 0;
        });
        if (is_used) {
            drafters_[i].drafter->observe(spans);
        }
    }
}

// In batches of what the target takes.
void Batch::evaluate_parts(const Plans & plans) {
    Plans part;
    size_t n = 0;
    for (const Plan & plan : plans) {
        const bool is_alone = plan.text->is_suspect || (!part.empty() && part.back().text->is_suspect);
        if (!part.empty() && (is_alone || n + plan.span.n > static_cast<size_t>(target_.n_batch()))) {
            evaluate_plans(part);
            part.clear();
            n = 0;
        }
        if (!plan.text->is_running()) {
            continue; // it had to make room
        }
        part.push_back(plan);
        n += plan.span.n;
    }
    evaluate_plans(part);
}

void Batch::evaluate_plans(const Plans & plans) {
    if (plans.empty()) {
        return;
    }
    std::vector<Span> spans;
    for (const Plan & plan : plans) {
        spans.push_back(plan.span);
    }
    int64_t us = 0;
    try {
        const Stopwatch stopwatch(us);
        evaluate(spans);
    } catch (...) {
        const Failure failure = current_failure();
        Plans rest;
        for (const Plan & plan : plans) {
            plan.text->sequence.memory().failed();
        }
        const bool has_room = failure.status == PYFLY_STATUS_CONTEXT_FULL && make_room(plans);
        if (plans.size() == 1 && !has_room) {
            stop(*plans.front().text, false);
            return;
        }
        for (const Plan & plan : plans) {
            if (!plan.text->is_running()) {
                continue;
            }
            if (plan.text->sequence.memory().n() < plan.span.n_past) { // what it had is lost: another time
                plan.text->is_suspect = !has_room;
                plan.text->sequence.postpone();
            } else {
                rest.push_back(plan);
            }
        }
        const auto middle = rest.begin() + static_cast<std::ptrdiff_t>(has_room ? rest.size() : rest.size() / 2);
        evaluate_plans({rest.begin(), middle});
        evaluate_plans({middle, rest.end()});
        return;
    }
    take(plans, us);
}

// The cache is full: drops what an ended text left, the one that was used longest ago, or else lets the youngest text
// wait. Returns false if there is nobody but the one that asks.
bool Batch::make_room(const Plans & plans) {
    Text * idle = nullptr;
    Text * youngest = nullptr;
    size_t n_running = 0;
    for (Text & t : texts_) {
        const bool holds = t.sequence.memory().n() > 0;
        const bool asks = std::any_of(plans.begin(), plans.end(), [&](const Plan & p) { return p.text == &t; });
        if (!t.sequence.is_active()) {
            idle = holds && (idle == nullptr || t.used < idle->used) ? &t : idle;
        } else if (!t.is_waiting && (holds || asks)) {
            n_running++;
            youngest = youngest == nullptr || t.order > youngest->order ? &t : youngest;
        }
    }
    if (idle != nullptr) {
        idle->sequence.memory().clear();
        return true;
    }
    if (n_running < 2) {
        return false;
    }
    youngest->is_waiting = true;
    youngest->sequence.postpone();
    youngest->sequence.memory().clear();
    return true;
}

void Batch::take(const Plans & plans, int64_t us) {
    size_t n_tokens = 0;
    bool is_all_rows = true;
    for (const Plan & plan : plans) {
        n_tokens += plan.span.n;
        is_all_rows = is_all_rows && plan.span.first_row == 0 && !plan.text->sequence.config().all_rows;
    }
    if (is_all_rows) {
        policy_->observe_target(static_cast<int32_t>(n_tokens), static_cast<double>(us));
    }
    for (size_t i = 0; i < plans.size(); i++) {
        Text & t = *plans[i].text;
        const int32_t n_rounds = t.sequence.n_rounds();
        try {
            t.sequence.take(i, us * static_cast<int64_t>(plans[i].span.n) / static_cast<int64_t>(n_tokens));
            t.is_suspect = false;
            if (t.sequence.n_rounds() > n_rounds) {
                const Transcript & transcript = t.sequence.transcript();
                const Draft & draft = t.sequence.draft();
                const int64_t n_room = t.n_room - static_cast<int64_t>(transcript.records().size());
                t.n_room = static_cast<int32_t>(std::max<int64_t>(n_room, 1));
                t.outcomes.learn(*policy_, t.slot(), draft.drafter, t.proposal_class, draft.tokens, t.n_asked,
                                 t.sequence.draft_begin(), transcript.history(),
                                 vocabulary_.is_eog(transcript.history().back()));
            }
        } catch (...) {
            stop(t, true);
        }
    }
}

// ---- Drafting -------------------------------------------------------------------------------------------------------

// What each text may choose from. Where something is chosen (and not just asked for in turn), free drafters are asked
// first.
std::vector<Candidate> Batch::offer(std::vector<Drafting> & texts) {
    std::vector<std::vector<int32_t>> k_max(texts.size(), std::vector<int32_t>(drafters_.size(), 0));
    for (size_t i = 0; i < texts.size(); i++) {
        const Text & t = *texts[i].text;
        const int64_t limit = t.sequence.draft_limit(t.n_room);
        for (size_t d = 0; d < drafters_.size(); d++) {
            k_max[i][d] = static_cast<int32_t>(
                std::clamp<int64_t>(limit, 0, static_cast<int64_t>(t.sequence.config().draft_max[d])));
        }
        texts[i].free.resize(drafters_.size());
    }
    for (size_t d = 0; d < drafters_.size() && !policy_->asks_the_next(); d++) {
        if (!drafters_[d].drafter->is_free()) {
            continue;
        }
        std::vector<DraftRequest> requests;
        for (size_t i = 0; i < texts.size(); i++) {
            if (k_max[i][d] > 0) {
                const Sequence & sequence = texts[i].text->sequence;
                requests.push_back(
                    {texts[i].text->slot(), &sequence.transcript().history(), k_max[i][d], &texts[i].free[d]});
            }
        }
        ask(d, requests);
        for (size_t i = 0; i < texts.size(); i++) {
            k_max[i][d] = static_cast<int32_t>(texts[i].free[d].tokens.size());
        }
    }
    std::vector<Candidate> candidates;
    for (size_t i = 0; i < texts.size(); i++) {
        const Text & t = *texts[i].text;
        Candidate candidate = {t.slot(), {}};
        for (size_t d = 0; d < drafters_.size() && t.sequence.is_active(); d++) {
            if (k_max[i][d] > 0) {
                const std::vector<int32_t> & history = t.sequence.transcript().history();
                candidate.offers.push_back({static_cast<int32_t>(d), k_max[i][d], texts[i].free[d].proposal_class,
                                            static_cast<int64_t>(drafters_[d].drafter->n_behind(t.slot(), history))});
            }
        }
        candidates.push_back(std::move(candidate));
    }
    return candidates;
}

// Asks a drafter. Where that fails, every text alone, so that only the one that causes it stops.
void Batch::ask(size_t drafter, const std::vector<DraftRequest> & requests) {
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
    } catch (...) {
        if (requests.size() == 1) {
            requests.front().out->tokens.clear();
            stop(text(requests.front().text), true);
            return;
        }
        for (const DraftRequest & request : requests) {
            *request.out = {};
            ask(drafter, {request});
        }
    }
}

// Asks one drafter on behalf of the texts that chose it.
void Batch::ask_chosen(size_t drafter, std::vector<Drafting> & texts, const std::vector<Choice> & choices) {
    const bool is_governed = !policy_->asks_the_next();
    std::vector<DraftRequest> requests;
    std::vector<int32_t> asked;
    for (size_t i = 0; i < texts.size(); i++) {
        Drafting & d = texts[i];
        Text & t = *d.text;
        if (choices[i].drafter != static_cast<int32_t>(drafter) || choices[i].k < 1 || !t.sequence.is_active()) {
            continue;
        }
        d.draft.drafter = choices[i].drafter;
        t.n_asked = 0;
        if (is_governed && drafters_[drafter].drafter->is_free()) {
            d.proposal = std::move(d.free[drafter]);
            d.proposal.tokens.resize(static_cast<size_t>(choices[i].k));
            continue;
        }
        try {
            while (is_governed && catch_up(t, drafter) > 0) {
            }
        } catch (...) {
            stop(t, true);
            continue;
        }
        t.n_asked = is_governed ? choices[i].k : 0;
        requests.push_back({t.slot(), &t.sequence.transcript().history(), choices[i].k, &d.proposal});
        asked.push_back(choices[i].k);
    }
    int64_t us = 0;
    {
        const Stopwatch stopwatch(us);
        ask(drafter, requests);
    }
    if (!requests.empty()) {
        policy_->observe_draft(static_cast<int32_t>(drafter), asked, static_cast<double>(us));
    }
}

// What the policy chooses. Where it only names who is asked first, a text that got nothing turns to the next drafter.
void Batch::choose(std::vector<Drafting> & texts, int64_t n_other_rows) {
    std::vector<Candidate> candidates = offer(texts);
    bool asks_on = true;
    while (asks_on) {
        const std::vector<Choice> choices = policy_->choose(candidates, n_other_rows);
        for (size_t d = 0; d < drafters_.size(); d++) {
            ask_chosen(d, texts, choices);
        }
        asks_on = false;
        for (size_t i = 0; i < texts.size() && policy_->asks_the_next(); i++) {
            std::vector<Offer> & offers = candidates[i].offers;
            if (!texts[i].proposal.tokens.empty()) {
                offers.clear();
            } else if (!offers.empty()) {
                offers.erase(offers.begin());
            }
            asks_on = asks_on || !offers.empty();
        }
    }
    for (Drafting & d : texts) {
        d.draft.tokens = std::move(d.proposal.tokens);
        d.text->proposal_class = d.proposal.proposal_class;
        for (size_t i = 0; i < d.free.size(); i++) {
            d.text->outcomes.follow(static_cast<int32_t>(i), std::move(d.free[i]), d.text->sequence.transcript().n());
        }
    }
}

void Batch::draft(std::vector<Drafting> & texts, int64_t n_other_rows) {
    if (drafters_.empty() || texts.empty()) {
        return;
    }
    int64_t us = 0;
    {
        const Stopwatch stopwatch(us);
        choose(texts, n_other_rows);
    }
    for (const Drafting & d : texts) {
        d.text->sequence.stats().us_draft += us / static_cast<int64_t>(texts.size());
    }
}

} // namespace pyfly
