#include "engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <string>

#include "error.h"
#include "verify.h"

namespace pyfly {

namespace {

constexpr double not_measured = std::numeric_limits<double>::quiet_NaN();
constexpr pyfly_gate_node exact_gate = {PYFLY_GATE_EXACT, 0, 0.0};
constexpr pyfly_window_config default_window = {6, PYFLY_WINDOW_AGREE, -1, 0};

// Adds the microseconds of its own life to a counter.
class Stopwatch {
  public:
    explicit Stopwatch(int64_t & counter) : counter_(counter), start_(std::chrono::steady_clock::now()) {}
    ~Stopwatch() {
        counter_ +=
            std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start_).count();
    }
    Stopwatch(const Stopwatch &) = delete;
    Stopwatch & operator=(const Stopwatch &) = delete;

  private:
    int64_t & counter_;
    std::chrono::steady_clock::time_point start_;
};

} // namespace

Engine::Engine(Target & target)
    : target_(target), config_{Gate(&exact_gate, 1), default_window, false, false, false, false},
      window_(default_window) {}

void Engine::configure(EngineConfig config, std::vector<EngineDrafter> drafters) {
    if (is_active_) {
        throw Error(PYFLY_STATUS_INVALID, "gate, window and drafter can be changed between requests, not during one");
    }
    if (drafters.size() > PYFLY_MAX_DRAFTERS) {
        throw Error(PYFLY_STATUS_INVALID, "at most " + std::to_string(PYFLY_MAX_DRAFTERS) + " drafters work together");
    }
    for (const EngineDrafter & d : drafters) {
        if (d.draft_max < 0 || d.draft_max > target_.n_batch() - 1) {
            throw Error(PYFLY_STATUS_INVALID,
                        "draft_max is " + std::to_string(d.draft_max) + ", but one batch of " +
                            std::to_string(target_.n_batch()) +
                            " tokens holds the last token and the draft; keep draft_max under n_batch");
        }
    }
    window_ = Window(config.window); // throws before anything changed
    const bool is_same = std::equal(drafters.begin(), drafters.end(), drafters_.begin(), drafters_.end(),
                                    [](const auto & a, const auto & b) { return a.drafter == b.drafter; });
    if (!is_same) {
        governor_ = Governor();
        for (size_t i = 0; i < drafters.size(); i++) {
            governor_.expect(static_cast<int32_t>(i), drafters[i].drafter->is_free(),
                             drafters[i].drafter->expected_cost());
        }
    }
    config_ = std::move(config);
    drafters_ = std::move(drafters);
}

// Throws unless the target can go on from these tokens.
void Engine::require_sequence(const std::vector<int32_t> & history) const {
    if (history.size() > static_cast<size_t>(target_.n_ctx())) {
        throw Error(PYFLY_STATUS_CONTEXT_FULL, "the prompt has " + std::to_string(history.size()) +
                                                   " tokens and the context holds " + std::to_string(target_.n_ctx()) +
                                                   "; shorten the prompt or raise n_ctx");
    }
    for (const int32_t token : history) {
        if (token < 0 || token >= target_.n_vocab()) {
            throw Error(PYFLY_STATUS_INVALID, "token " + std::to_string(token) + " is outside the vocabulary of " +
                                                  std::to_string(target_.n_vocab()));
        }
    }
}

void Engine::begin(std::vector<int32_t> history, size_t n_evaluated, std::unique_ptr<Sampler> sampler) {
    if (history.empty() || n_evaluated >= history.size()) {
        throw Error(PYFLY_STATUS_INVALID, "a sequence needs at least one token that is not evaluated yet");
    }
    require_sequence(history);
    is_active_ = false;
    if (checkpoint_.size() > n_evaluated || !std::equal(checkpoint_.begin(), checkpoint_.end(), history.begin())) {
        target_.forget_checkpoint(); // it is of another text
        checkpoint_.clear();
    }
    n_memory_ = static_cast<size_t>(target_.truncate(static_cast<int32_t>(n_evaluated)));
    history_ = std::move(history);
    sampler_ = std::move(sampler);
    window_ = Window(config_.window);
    pending_.clear();
    open_.clear();
    records_.clear();
    rejected_.clear();
    record_rows_.clear();
    record_samplers_.clear();
    prompt_row_begin_ = prompt_row_end_ = 0;
    shadows_.clear();
    if (config_.adaptive) {
        governor_.begin_text();
    }
    round_ = 0;
    is_active_ = has_sequence_ = true;
    is_broken_ = false;
}

void Engine::resume(size_t n_keep, const int32_t * tokens, size_t n_tokens) {
    const auto record = std::find_if(records_.begin(), records_.end(), [&](const pyfly_record & r) {
        return static_cast<size_t>(r.position) + 1 == n_keep;
    });
    if (!is_active_ || !config_.resumable || record == records_.end()) {
        throw Error(PYFLY_STATUS_INVALID, "a sequence goes on only behind a token that its last round committed");
    }
    std::vector<int32_t> history(history_.begin(), history_.begin() + static_cast<std::ptrdiff_t>(n_keep));
    history.insert(history.end(), tokens, tokens + n_tokens);
    require_sequence(history);
    std::unique_ptr<Sampler> & then = record_samplers_[static_cast<size_t>(record - records_.begin())];
    std::unique_ptr<Sampler> sampler = std::move(then ? then : sampler_);
    begin(std::move(history), std::min(n_keep - 1, n_memory_), std::move(sampler));
}

// Evaluates tokens[n] behind what the memory holds.
void Engine::evaluate(const int32_t * tokens, size_t n, size_t first_row) {
    const int32_t n_past = static_cast<int32_t>(n_memory_);
    prompt_row_begin_ = prompt_row_end_ = 0;
    try {
        target_.evaluate(tokens, n, n_past, first_row);
    } catch (...) {
        is_active_ = false;
        is_broken_ = true;
        n_memory_ = static_cast<size_t>(target_.truncate(n_past));
        throw;
    }
    n_memory_ += n;
    for (const EngineDrafter & d : drafters_) {
        if (d.draft_max > 0 && target_.can_rewind()) {
            d.drafter->observe(tokens, n, n_past);
        }
    }
}

// Most drafts of a round.
int64_t Engine::draft_max() const {
    int64_t n = 0;
    for (const EngineDrafter & d : drafters_) {
        n = std::max<int64_t>(n, d.draft_max);
    }
    return n;
}

// Evaluates the history up to position n, no rows wanted.
void Engine::catch_up(size_t n) {
    while (n_memory_ < n) {
        const size_t n_batch = std::min(n - n_memory_, static_cast<size_t>(target_.n_batch()));
        evaluate(history_.data() + n_memory_, n_batch, n_batch);
        (round_ == 0 ? stats_.prefilled : stats_.replayed) += static_cast<int64_t>(n_batch);
    }
}

void Engine::checkpoint() {
    if (target_.checkpoint()) {
        stats_.checkpoints++;
        checkpoint_.assign(history_.begin(), history_.begin() + static_cast<std::ptrdiff_t>(n_memory_));
    } else {
        checkpoint_.clear();
    }
}

size_t Engine::prefill(bool all_rows) {
    if (!is_active_) {
        throw Error(PYFLY_STATUS_INVALID, "no sequence was begun");
    }
    const Stopwatch stopwatch(stats_.us_prefill);
    const size_t n_batch = static_cast<size_t>(target_.n_batch());
    // The first round evaluates the last batch together with its draft; if every row is wanted, only the last token. So
    // does a recurrent target, whose state before it is worth a checkpoint: another answer starts from there.
    const size_t n_first_round = all_rows || is_limited() ? 1 : n_batch;
    size_t n_left = history_.size() - n_memory_;
    if (n_left > n_first_round) {
        const size_t n = std::min(n_batch, n_left - 1);
        const size_t begin = n_memory_;
        evaluate(history_.data() + begin, n, all_rows ? 0 : n);
        if (all_rows) {
            prompt_row_begin_ = static_cast<int32_t>(begin);
            prompt_row_end_ = static_cast<int32_t>(n_memory_);
        }
        stats_.prefilled += static_cast<int64_t>(n);
        n_left -= n;
        return n_left; // > 0: the caller reads the rows before it asks again
    }
    prompt_row_begin_ = prompt_row_end_ = 0;
    if (is_limited() && n_memory_ > 0 && checkpoint_.size() != n_memory_) {
        checkpoint();
    }
    for (size_t i = 0; i < drafters_.size() && target_.can_rewind(); i++) {
        const EngineDrafter & d = drafters_[i];
        if (d.draft_max < 1 || (config_.adaptive && !governor_.can_pay(static_cast<int32_t>(i), d.draft_max))) {
            continue; // it will not be asked soon
        }
        if (const size_t n_behind = prepare(i)) {
            return n_behind;
        }
    }
    return 0;
}

const float * Engine::prompt_row(int32_t position) const {
    if (position < prompt_row_begin_ || position >= prompt_row_end_) {
        return nullptr;
    }
    return target_.row(static_cast<size_t>(position - prompt_row_begin_));
}

Engine::Proposal Engine::propose(int32_t n_room) {
    const int64_t n_unevaluated = static_cast<int64_t>(history_.size() - n_memory_);
    // An open window is decided by what is drafted, also where nobody wants that any more.
    const int64_t n_wanted = window_.oldest_open() ? Target::unlimited : static_cast<int64_t>(n_room) - 1;
    const int64_t n_max =
        std::min({n_wanted, target_.n_ctx() - static_cast<int64_t>(history_.size()), target_.n_batch() - n_unevaluated,
                  static_cast<int64_t>(target_.can_checkpoint() ? Target::unlimited : target_.rewind_depth())});
    if (drafters_.empty() || n_max < 1 || !target_.can_rewind()) {
        return {};
    }
    const Stopwatch stopwatch(stats_.us_draft);
    Proposal proposal = config_.adaptive ? draft_best(n_max) : draft_first(n_max);
    for (const int32_t token : proposal.tokens) {
        if (token < 0 || token >= target_.n_vocab()) {
            throw Error(PYFLY_STATUS_INVALID, "the drafter proposed token " + std::to_string(token) +
                                                  ", which is outside the target's vocabulary of " +
                                                  std::to_string(target_.n_vocab()) + "; fix or remove the drafter");
        }
    }
    return proposal;
}

// Lets a drafter catch up with one batch of the history. Returns how many tokens are left; call again until it is 0.
size_t Engine::prepare(size_t drafter) {
    Drafter & d = *drafters_[drafter].drafter;
    const int64_t n_before = static_cast<int64_t>(d.n_behind(history_));
    size_t n_left = 0;
    int64_t us = 0;
    {
        const Stopwatch stopwatch(us);
        n_left = d.prepare(history_);
    }
    governor_.observe_catch_up(static_cast<int32_t>(drafter), n_before - static_cast<int64_t>(n_left),
                               static_cast<double>(us));
    return n_left;
}

// Asks one drafter for at most n_max tokens.
void Engine::draft_with(size_t drafter, int64_t n_max, Proposal & proposal) {
    const EngineDrafter & d = drafters_[drafter];
    const int64_t k = std::min<int64_t>(n_max, d.draft_max);
    if (k < 1) {
        return;
    }
    d.drafter->draft(history_, static_cast<int32_t>(k), proposal.tokens);
    if (!proposal.tokens.empty()) {
        proposal.drafter = static_cast<int32_t>(drafter);
        proposal.proposal_class = d.drafter->proposal_class();
    }
}

// The first drafter that has something to say.
Engine::Proposal Engine::draft_first(int64_t n_max) {
    Proposal proposal;
    for (size_t i = 0; i < drafters_.size() && proposal.tokens.empty(); i++) {
        draft_with(i, n_max, proposal);
    }
    return proposal;
}

// What the governor expects most of. Free drafters are asked first; those that are not chosen leave a shadow.
Engine::Proposal Engine::draft_best(int64_t n_max) {
    std::vector<Proposal> proposals(drafters_.size());
    std::vector<Governor::Offer> offers;
    for (size_t i = 0; i < drafters_.size(); i++) {
        const bool is_free = drafters_[i].drafter->is_free();
        int64_t k_max = std::min<int64_t>(n_max, drafters_[i].draft_max);
        if (is_free) {
            draft_with(i, n_max, proposals[i]);
            k_max = static_cast<int64_t>(proposals[i].tokens.size());
        }
        if (k_max > 0) {
            offers.push_back({static_cast<int32_t>(i), static_cast<int32_t>(k_max), proposals[i].proposal_class,
                              static_cast<int64_t>(drafters_[i].drafter->n_behind(history_))});
        }
    }
    const Governor::Choice choice = governor_.choose(offers);
    Proposal chosen;
    for (size_t i = 0; i < drafters_.size(); i++) {
        if (choice.drafter != static_cast<int32_t>(i)) {
            const bool is_followed = std::any_of(shadows_.begin(), shadows_.end(), [&](const Shadow & shadow) {
                return shadow.proposal.drafter == static_cast<int32_t>(i);
            });
            if (!proposals[i].tokens.empty() && !is_followed) {
                shadows_.push_back({std::move(proposals[i]), history_.size()});
            }
        } else if (drafters_[i].drafter->is_free()) {
            chosen = std::move(proposals[i]);
            chosen.tokens.resize(static_cast<size_t>(choice.k));
        } else {
            while (prepare(i) > 0) {
            }
            int64_t us = 0;
            {
                const Stopwatch stopwatch(us);
                draft_with(i, choice.k, chosen);
            }
            chosen.drafter = choice.drafter;
            chosen.n_asked = choice.k;
            governor_.observe_draft(choice.drafter, choice.k, static_cast<double>(us));
        }
    }
    return chosen;
}

// Tells the governor what became of this round's draft and of the proposals that were not verified.
void Engine::learn(const Proposal & proposal, size_t n_before) {
    governor_.observe_length(static_cast<int64_t>(history_.size()) - static_cast<int64_t>(n_before));
    if (proposal.drafter >= 0) {
        size_t n_accepted = 0;
        while (n_accepted < proposal.tokens.size() && n_before + n_accepted < history_.size() &&
               history_[n_before + n_accepted] == proposal.tokens[n_accepted]) {
            n_accepted++;
        }
        // What was drafted behind the end was not wrong. A draft that ended early is one that failed there: it was paid
        // for, and brought no more.
        const size_t n_drafted = std::max(proposal.tokens.size(), static_cast<size_t>(proposal.n_asked));
        const bool is_end = target_.is_eog(history_.back());
        governor_.observe_acceptance(proposal.drafter, proposal.proposal_class,
                                     static_cast<int32_t>(is_end ? n_accepted : n_drafted),
                                     static_cast<int32_t>(n_accepted));
    }
    for (size_t i = 0; i < shadows_.size();) {
        const Shadow & shadow = shadows_[i];
        const std::vector<int32_t> & tokens = shadow.proposal.tokens;
        const size_t n_known = history_.size() > shadow.position ? history_.size() - shadow.position : 0;
        size_t n_right = 0;
        while (n_right < std::min(tokens.size(), n_known) && history_[shadow.position + n_right] == tokens[n_right]) {
            n_right++;
        }
        if (n_right == n_known && n_right < tokens.size() && n_known > 0) {
            i++; // right so far
            continue;
        }
        governor_.observe_acceptance(shadow.proposal.drafter, shadow.proposal.proposal_class,
                                     static_cast<int32_t>(tokens.size()), static_cast<int32_t>(n_right));
        shadows_.erase(shadows_.begin() + static_cast<std::ptrdiff_t>(i));
    }
}

size_t Engine::round(int32_t n_room) {
    if (!is_active_) {
        throw Error(PYFLY_STATUS_INVALID, "no sequence was begun");
    }
    if (n_room < 1) {
        throw Error(PYFLY_STATUS_INVALID, "a round needs room for at least one token");
    }
    if (history_.size() > static_cast<size_t>(target_.n_ctx())) {
        throw Error(PYFLY_STATUS_CONTEXT_FULL, "the context of " + std::to_string(target_.n_ctx()) +
                                                   " tokens is full; raise n_ctx or start a new sequence");
    }
    records_.clear();
    rejected_.clear();
    record_rows_.clear();
    record_samplers_.clear();
    const size_t n_before = history_.size();
    try {
        if (n_memory_ + 1 < n_before && static_cast<int64_t>(n_before - n_memory_) + draft_max() > target_.n_batch()) {
            catch_up(n_before - 1); // too much was forgotten to go with this round's batch
        }
        const Proposal proposal = propose(n_room);
        const std::vector<int32_t> & draft = proposal.tokens;
        if (static_cast<int64_t>(draft.size()) > target_.rewind_depth() && !window_.oldest_open()) {
            catch_up(n_before - 1);
            checkpoint(); // an open window has one, further back
        }
        const size_t first_row = n_before - n_memory_ - 1;
        int64_t us = 0;
        {
            const Stopwatch stopwatch(us);
            std::vector<int32_t> batch(history_.begin() + static_cast<std::ptrdiff_t>(n_memory_), history_.end());
            batch.insert(batch.end(), draft.begin(), draft.end());
            evaluate(batch.data(), batch.size(), first_row);
        }
        (first_row > 0 && round_ == 0 ? stats_.us_prefill : stats_.us_verify) += us;
        (round_ == 0 ? stats_.prefilled : stats_.replayed) += static_cast<int64_t>(first_row);
        stats_.rounds++;
        stats_.drafted += static_cast<int64_t>(draft.size());
        for (size_t i = 0; i < draft.size(); i++) {
            stats_.drafted_at[std::min<size_t>(i, PYFLY_MAX_DEPTH - 1)]++;
        }
        const Stopwatch stopwatch(stats_.us_gate);
        verify(proposal, first_row);
        if (history_.size() > static_cast<size_t>(target_.n_ctx())) {
            settle(window_.give_up()); // no round can follow that would decide it
        }
        fall_back();
        const std::optional<int64_t> open = window_.oldest_open();
        if (is_limited() && open && *open >= static_cast<int64_t>(n_before)) {
            // Later rounds may come back to this mismatch from further than the target can rewind. The tokens behind it
            // go with the next round's batch.
            truncate_memory(static_cast<size_t>(*open));
            checkpoint();
        } else {
            truncate_memory(history_.size() - 1);
        }
        round_++;
        if (config_.adaptive) {
            if (first_row == 0) {
                governor_.observe_target(static_cast<int32_t>(draft.size()) + 1, static_cast<double>(us));
            }
            learn(proposal, n_before);
        }
        commit();
    } catch (...) {
        // The sequence ends here, but the target's memory stays a true prefix of it.
        is_active_ = false;
        history_.resize(std::min(history_.size(), n_before));
        records_.clear();
        truncate_memory(std::min(n_memory_, n_before - 1));
        throw;
    }
    return records_.size();
}

// Positions are settled one after the other, because what the sampler does at one depends on the tokens before it.
void Engine::verify(const Proposal & proposal, size_t first_row) {
    for (size_t i = 0; verify_position(proposal, i, target_.row(first_row + i)); i++) {
    }
}

// A mismatch that the target could not come back to after another round is not left open: its window falls back to the
// round.
void Engine::fall_back() {
    const std::optional<int64_t> open = window_.oldest_open();
    if (open && !target_.can_return(static_cast<int32_t>(*open), static_cast<int32_t>(draft_max()) + 1)) {
        stats_.window_fallbacks++;
        settle(window_.give_up());
    }
}

// Settles position i of the round (i = draft.size(): the bonus). Returns whether the round goes on.
bool Engine::verify_position(const Proposal & proposal, size_t i, const float * row) {
    const std::vector<int32_t> & draft = proposal.tokens;
    const size_t n_vocab = static_cast<size_t>(target_.n_vocab());
    const int64_t position = static_cast<int64_t>(history_.size());
    if (config_.resumable && !pending_.empty() && !pending_.back().sampler) {
        pending_.back().sampler = sampler_->clone();
    }
    const int32_t choice = sampler_->choose(row, n_vocab);
    const bool is_drafted = i < draft.size();
    const int32_t token = is_drafted ? draft[i] : choice;

    pyfly_record record = {};
    record.position = static_cast<int32_t>(position);
    record.token = choice;
    record.origin = PYFLY_ORIGIN_TARGET;
    record.choice = choice;
    record.reason = -1;
    record.drafter = -1;
    record.round = round_;
    record.entropy = record.margin = record.logprob = not_measured;

    if (token == choice) {
        if (is_drafted) {
            record.origin = PYFLY_ORIGIN_MATCHED;
            record.reason = PYFLY_REASON_MATCH;
            record.depth = static_cast<int32_t>(i) + 1;
            record.drafter = proposal.drafter;
        }
        if (config_.trace) {
            measure(record);
        }
        sampler_->accept(choice);
        push(record, row, {});
        Window::Outcome outcome;
        const bool is_end = target_.is_eog(choice);
        if (is_end) {
            window_.end_of_text();
        } else {
            outcome = is_drafted ? window_.match(position) : window_.own(position);
        }
        if (!outcome && (!is_drafted || is_end)) {
            outcome = window_.end_of_round();
        }
        settle(outcome);
        return is_drafted && !is_end && !outcome;
    }

    // A mismatch: safety, gate, window.
    pyfly_reason reason = PYFLY_REASON_GATE;
    const bool is_safe = !target_.is_protected(token) && !target_.is_protected(choice) && sampler_->could_draw(token);
    if (keeps_shaped_rows()) {
        const Mismatch mismatch = judge_mismatch(config_.gate, sampler_->shaped_row(), n_vocab, token, is_safe);
        reason = mismatch.rejected;
        record.entropy = mismatch.entropy;
        record.margin = mismatch.margin;
        record.logprob = static_cast<double>(sampler_->shaped_row()[choice]) - mismatch.log_sum_exp;
    } else if (!is_safe) {
        reason = PYFLY_REASON_SAFETY;
    }
    if (reason == PYFLY_REASON_LOOSE && !window_.fits(static_cast<int64_t>(draft.size() - 1 - i))) {
        reason = PYFLY_REASON_BOUNDARY;
    }
    const auto rejected_drafts = [&] {
        return std::vector<int32_t>(draft.begin() + static_cast<std::ptrdiff_t>(i), draft.end());
    };

    if (reason == PYFLY_REASON_LOOSE) {
        if (const Window::Outcome outcome = window_.deferred(position)) {
            settle(outcome);
            return false;
        }
        if (window_.is_open(position)) {
            Open open = {position, sampler_->clone(), record};
            open.sampler->accept(choice);
            open_.push_back(std::move(open));
        }
        pyfly_record loose = record;
        loose.token = token;
        loose.origin = PYFLY_ORIGIN_LOOSE;
        loose.reason = PYFLY_REASON_LOOSE;
        loose.depth = static_cast<int32_t>(i) + 1;
        loose.drafter = proposal.drafter;
        loose.logprob = record.logprob + (static_cast<double>(sampler_->shaped_row()[token]) -
                                          static_cast<double>(sampler_->shaped_row()[choice]));
        sampler_->accept(token);
        push(loose, row, {});
        return true;
    }

    Window::Outcome outcome;
    if (target_.is_eog(choice)) {
        window_.end_of_text(); // the target ends the text here: it agreed to what stands before
    } else {
        outcome = window_.rejected(position);
    }
    if (!outcome) {
        record.reason = reason;
        count_rejection(record);
        sampler_->accept(choice);
        push(record, row, rejected_drafts());
        outcome = window_.end_of_round();
    }
    settle(outcome);
    return false;
}

void Engine::push(const pyfly_record & record, const float * row, std::vector<int32_t> rejected) {
    history_.push_back(record.token);
    Pending pending = {record, std::move(rejected), {}, nullptr};
    if (config_.keep_rows && row != nullptr) {
        pending.row.assign(row, row + target_.n_vocab());
    }
    pending_.push_back(std::move(pending));
}

// Acts on what the window decided, and forgets the snapshots of mismatches that stand now.
void Engine::settle(const Window::Outcome & outcome) {
    if (outcome) {
        roll_back(*outcome);
    }
    open_.erase(
        std::remove_if(open_.begin(), open_.end(), [&](const Open & o) { return !window_.is_open(o.position); }),
        open_.end());
}

void Engine::roll_back(const Window::Rejection & rejection) {
    const auto open =
        std::find_if(open_.begin(), open_.end(), [&](const Open & o) { return o.position == rejection.position; });
    const auto first = std::find_if(pending_.begin(), pending_.end(),
                                    [&](const Pending & p) { return p.record.position == rejection.position; });
    if (open == open_.end() || first == pending_.end()) {
        throw Error(PYFLY_STATUS_INTERNAL, "a window was broken that is not open");
    }
    const size_t n_keep = static_cast<size_t>(rejection.position);
    std::vector<int32_t> rejected(history_.begin() + static_cast<std::ptrdiff_t>(n_keep), history_.end());
    stats_.rollbacks++;
    stats_.rolled_back += static_cast<int64_t>(rejected.size());
    std::vector<float> row = std::move(first->row);
    pending_.erase(first, pending_.end());
    history_.resize(n_keep);
    sampler_ = std::move(open->sampler);
    pyfly_record record = open->choice;
    record.reason = rejection.reason;
    open_.erase(open, open_.end());
    count_rejection(record);
    push(record, row.empty() ? nullptr : row.data(), std::move(rejected));
}

void Engine::count_rejection(const pyfly_record & record) {
    switch (record.reason) {
        case PYFLY_REASON_GATE:
            stats_.rejected_gate++;
            break;
        case PYFLY_REASON_WINDOW:
            stats_.rejected_window++;
            break;
        case PYFLY_REASON_BOUNDARY:
            stats_.rejected_boundary++;
            break;
        default:
            stats_.rejected_safety++;
    }
    if (std::isfinite(record.margin)) {
        stats_.sum_margin_rejected += record.margin;
        stats_.n_margin_rejected++;
    }
}

// Entropy and probability of a token that needed no judgement, for the trace.
void Engine::measure(pyfly_record & record) const {
    const float * row = sampler_->shaped_row();
    const RowStats stats = row_stats(row, static_cast<size_t>(target_.n_vocab()), config_.gate.n_top());
    record.entropy = stats.n_top > 0 ? stats.top_entropy(stats.n_top) : stats.entropy;
    record.margin = static_cast<double>(stats.max.logit) - static_cast<double>(row[record.token]);
    record.logprob = stats.log_prob(row[record.token]);
}

// Gives out every token before the oldest open mismatch.
void Engine::commit() {
    const int64_t end = window_.oldest_open().value_or(static_cast<int64_t>(history_.size()));
    size_t n = 0;
    for (; n < pending_.size() && pending_[n].record.position < end; n++) {
        Pending & pending = pending_[n];
        pyfly_record record = pending.record;
        record.rejected_begin = static_cast<int32_t>(rejected_.size());
        rejected_.insert(rejected_.end(), pending.rejected.begin(), pending.rejected.end());
        record.rejected_end = static_cast<int32_t>(rejected_.size());
        records_.push_back(record);
        if (config_.keep_rows) {
            record_rows_.push_back(std::move(pending.row));
        }
        if (config_.resumable) {
            record_samplers_.push_back(std::move(pending.sampler));
        }
        stats_.committed++;
        stats_.matched += record.origin == PYFLY_ORIGIN_MATCHED;
        if (record.origin == PYFLY_ORIGIN_LOOSE) {
            stats_.loose_accepted++;
            stats_.sum_margin_loose += record.margin;
        }
        if (record.depth > 0) {
            stats_.accepted_at[std::min(record.depth, PYFLY_MAX_DEPTH) - 1]++;
            stats_.accepted_by[record.drafter]++;
        }
    }
    pending_.erase(pending_.begin(), pending_.begin() + static_cast<std::ptrdiff_t>(n));
}

const float * Engine::record_row(size_t i) const {
    return i < record_rows_.size() && !record_rows_[i].empty() ? record_rows_[i].data() : nullptr;
}

void Engine::truncate_memory(size_t n) {
    if (n < n_memory_) {
        n_memory_ = static_cast<size_t>(target_.truncate(static_cast<int32_t>(n)));
    }
}

// Leaves n positions in the target's memory, for others to use. What it does not hold of them is evaluated, unless that
// has just failed.
void Engine::keep(size_t n) {
    truncate_memory(n);
    if (!is_broken_) {
        catch_up(std::min(n, history_.size()));
    }
    target_.settle();
}

void Engine::park(size_t n_keep) {
    if (has_sequence_) {
        keep(n_keep);
    }
}

void Engine::end(size_t n_keep) {
    is_active_ = false;
    open_.clear();
    pending_.clear();
    window_.clear();
    sampler_.reset(); // it may hold callbacks that live no longer than the request
    record_samplers_.clear();
    if (has_sequence_) {
        has_sequence_ = false;
        keep(n_keep);
    }
}

} // namespace pyfly
