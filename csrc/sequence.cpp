#include "sequence.h"

#include <algorithm>
#include <string>

#include "error.h"
#include "stop.h"
#include "stopwatch.h"

namespace pyfly {

namespace {

// Of what a limited target keeps of a prompt (a copy of its state, 20 to 150 MB, takes as long as a few tokens).
constexpr size_t worth_keeping = 64;     // tokens that need not be evaluated again thanks to it, at least
constexpr size_t n_between_kept = 512;   // tokens without one: then the next batch that ends has one
constexpr size_t n_searched = 64;        // tokens at the prompt's end in which the last message ends
constexpr size_t n_behind_messages = 32; // else: tokens that may begin an answer in the template

} // namespace

// Throws unless the target can go on from these tokens.
void Sequence::require_request(const std::vector<int32_t> & history) const {
    if (history.size() > static_cast<size_t>(target_->n_ctx())) {
        throw Error(PYFLY_STATUS_CONTEXT_FULL, "the prompt has " + std::to_string(history.size()) +
                                                   " tokens and the context holds " + std::to_string(target_->n_ctx()) +
                                                   "; shorten the prompt or raise {n_ctx}");
    }
    for (const int32_t token : history) {
        if (token < 0 || token >= target_->n_vocab()) {
            throw Error(PYFLY_STATUS_INVALID, "token " + std::to_string(token) + " is outside the vocabulary of " +
                                                  std::to_string(target_->n_vocab()));
        }
    }
}

void Sequence::begin(RequestConfig config, std::vector<int32_t> history, std::optional<size_t> n_evaluated,
                     std::unique_ptr<Sampler> sampler) {
    const int64_t answer_begin = static_cast<int64_t>(history.size());
    const Random random(sampler->distributions() != nullptr ? sampler->distributions()->seed() : 0);
    begin(std::move(config), std::move(history), n_evaluated, answer_begin, std::move(sampler), random);
}

void Sequence::begin(RequestConfig config, std::vector<int32_t> history, std::optional<size_t> n_evaluated,
                     int64_t answer_begin, std::unique_ptr<Sampler> sampler, Random random) {
    if (history.empty() || (n_evaluated && *n_evaluated >= history.size())) {
        throw Error(PYFLY_STATUS_INVALID, "a sequence needs at least one token that is not evaluated yet");
    }
    require_request(history);
    auto judge = std::make_unique<Judge>(*vocabulary_, config.gate, config.window, config.trace != 0, answer_begin,
                                         std::move(sampler), random); // throws
    is_active_ = false;
    const size_t n_held = n_evaluated ? *n_evaluated : memory_.n_common(history.data(), history.size() - 1);
    memory_.forget_other_checkpoints(history.data(), n_held);
    if (n_evaluated) {
        memory_.assume({history.begin(), history.begin() + static_cast<std::ptrdiff_t>(n_held)});
    } else {
        memory_.truncate(n_held);
    }
    memory_.release(); // what goes makes room for others; what cannot be gone back to is evaluated again
    judge_ = std::move(judge);
    config_ = std::move(config);
    transcript_.begin(std::move(history), static_cast<size_t>(target_->n_vocab()),
                      {config_.keep_rows != 0, config_.resumable != 0});
    n_messages_ = find_end_of_messages(transcript_.history());
    choose_kept(n_held);
    planned_ = Planned::nothing;
    prompt_row_begin_ = prompt_row_end_ = 0;
    step_ = 0;
    is_active_ = has_request_ = true;
    is_broken_ = false;
}

void Sequence::resume(size_t n_keep, const int32_t * tokens, size_t n_tokens) {
    const std::vector<pyfly_record> & records = transcript_.records();
    const auto record = std::find_if(records.begin(), records.end(), [&](const pyfly_record & r) {
        return static_cast<size_t>(r.position) + 1 == n_keep;
    });
    if (!is_active_ || !config_.resumable || record == records.end()) {
        throw Error(PYFLY_STATUS_INVALID, "a sequence continues only after a token that its last step committed");
    }
    const std::vector<int32_t> & old = transcript_.history();
    std::vector<int32_t> history(old.begin(), old.begin() + static_cast<std::ptrdiff_t>(n_keep));
    history.insert(history.end(), tokens, tokens + n_tokens);
    require_request(history);
    uncount(n_keep);
    std::unique_ptr<Sampler> then = transcript_.take_sampler(static_cast<size_t>(record - records.begin()));
    begin(config_, std::move(history), std::min(n_keep - 1, memory_.n()), judge_->answer_begin(),
          then ? std::move(then) : judge_->take_sampler(), judge_->random());
}

void Sequence::reset_stats() {
    stats_ = {};
    counts_step_ = false;
}

// The caller takes only the tokens before position n of what the last step committed.
void Sequence::uncount(size_t n) {
    if (counts_step_) {
        transcript_.uncount(static_cast<int64_t>(n), stats_);
        const std::vector<pyfly_record> & records = transcript_.records();
        stats_.steps -= !records.empty() && records.front().position >= static_cast<int64_t>(n) ? 1 : 0;
        counts_step_ = false;
    }
}

// Most drafts of a step.
int64_t Sequence::draft_max() const {
    int64_t n = 0;
    for (const int32_t k : config_.draft_max) {
        n = std::max<int64_t>(n, k);
    }
    return n;
}

// Evaluates the history up to position n, alone, no rows wanted.
void Sequence::catch_up(size_t n) {
    while (memory_.n() < n) {
        const size_t n_batch = std::min(n - memory_.n(), static_cast<size_t>(target_->n_batch()));
        const Span span = memory_.span(transcript_.history().data() + memory_.n(), n_batch, n_batch);
        try {
            require_wanted();
            evaluate_({span});
        } catch (...) {
            memory_.failed();
            throw;
        }
        memory_.evaluated(span);
        count_evaluated(n_batch);
    }
}

void Sequence::checkpoint(bool is_kept) {
    const bool is_new = !memory_.is_checkpointed();
    stats_.checkpoints += memory_.checkpoint(is_kept) && is_new ? 1 : 0;
}

// Where the last message of a prompt ends, at most at its last token. What stands behind that begins the answer, and a
// template that leaves out earlier thoughts writes it differently in the next turn.
size_t Sequence::find_end_of_messages(const std::vector<int32_t> & prompt) const {
    const size_t n = prompt.size() - 1;
    for (size_t i = n; i > n - std::min(n, n_searched); i--) {
        if (vocabulary_->is_eog(prompt[i - 1])) {
            return i;
        }
    }
    return n - std::min(n, n_behind_messages);
}

// Where the next request of whoever asks may part from this one: where its first message ends, as the system prompt
// does that many conversations begin with, where this one has parted from the last, of which n_alike tokens were held,
// and where its last message ends. Where the prompt ends a state is kept anyway.
void Sequence::choose_kept(size_t n_alike) {
    kept_.clear();
    if (!is_limited()) {
        return;
    }
    const std::vector<int32_t> & history = transcript_.history();
    size_t first = 0;
    while (first < n_messages_ && !vocabulary_->is_eog(history[first])) {
        first++;
    }
    const size_t last = n_messages_;
    for (const size_t place : {std::min(n_alike, last), std::max(n_alike, last), std::min(first + 1, last)}) {
        keep_at(place); // the first message's also if another one follows soon
    }
}

bool Sequence::keep_at(size_t n) {
    if (!is_limited()) {
        return true;
    }
    auto at = std::lower_bound(kept_.begin(), kept_.end(), n);
    const size_t before = at == kept_.begin() ? memory_.n_kept() : *(at - 1);
    if (n > memory_.n() && n < transcript_.n() && n >= before + worth_keeping && (at == kept_.end() || *at != n)) {
        at = kept_.insert(at, n);
    }
    const bool is_place = at != kept_.end() && *at == n;
    return (is_place ? n : before) > memory_.n();
}

// The next place at which a state is to be kept.
size_t Sequence::next_kept() const {
    const auto next = std::upper_bound(kept_.begin(), kept_.end(), memory_.n());
    return next == kept_.end() ? everything : *next;
}

size_t Sequence::n_left(size_t n_with_step) const {
    const size_t n_batch = static_cast<size_t>(target_->n_batch());
    // The first step evaluates the end of the prompt together with its draft; if every row is wanted, only the last
    // token. So does a recurrent target, whose state before it is worth a checkpoint: another answer starts from there.
    const bool is_alone = step_ == 0 && (config_.all_rows || is_limited());
    const size_t n_first = is_alone ? 1 : std::min(n_batch, std::max<size_t>(n_with_step, 1));
    const bool fits = n_unevaluated() + static_cast<size_t>(draft_max()) <= n_batch;
    return n_unevaluated() > 1 && (n_unevaluated() > n_first || !fits) ? n_unevaluated() - 1 : 0;
}

void Sequence::begin_iteration() {
    transcript_.begin_step();
    prompt_row_begin_ = prompt_row_end_ = 0;
    memory_.truncate(transcript_.n() - 1); // it may have been parked behind the last token, whose row is wanted
}

const Span & Sequence::plan_prompt(size_t n_most) {
    const size_t begin = memory_.n();
    const size_t n =
        std::min({n_most, transcript_.n() - 1 - begin, static_cast<size_t>(target_->n_batch()), next_kept() - begin});
    const auto first = transcript_.history().begin() + static_cast<std::ptrdiff_t>(begin);
    tokens_.assign(first, first + static_cast<std::ptrdiff_t>(n));
    planned_ = Planned::prompt;
    span_ = memory_.span(tokens_.data(), n, config_.all_rows ? 0 : n);
    return span_;
}

int64_t Sequence::draft_limit(int64_t n_room) const {
    if (!target_->can_rewind()) {
        return 0;
    }
    // An open window is decided by what is drafted, also where nobody wants that any more.
    const int64_t n_wanted = judge_->oldest_open() ? Model::unlimited : n_room - 1;
    return std::min({n_wanted, target_->n_ctx() - static_cast<int64_t>(transcript_.n()),
                     target_->n_batch() - static_cast<int64_t>(n_unevaluated()),
                     static_cast<int64_t>(target_->can_checkpoint() ? Model::unlimited : target_->rewind_depth())});
}

DrawDraft Sequence::draw_draft() {
    if (!judge_->draws()) {
        return {};
    }
    judge_->begin_draft();
    return
        [this](const float * row, size_t n, std::vector<Weights> & drawn) { return judge_->draw_draft(row, n, drawn); };
}

bool Sequence::be_silent() {
    const bool has_rolled_back = judge_->be_silent(transcript_, stats_);
    memory_.truncate(transcript_.n() - 1);
    return has_rolled_back;
}

const Span & Sequence::plan_step(Draft draft) {
    const std::vector<int32_t> & history = transcript_.history();
    draft_ = std::move(draft);
    n_before_ = history.size();
    planned_ = Planned::step;
    if (step_ == 0 && is_limited() && memory_.n() > 0) {
        checkpoint(true); // another answer starts from here
    }
    if (static_cast<int64_t>(draft_.tokens.size()) > target_->rewind_depth() && !judge_->oldest_open()) {
        catch_up(n_before_ - 1);
        checkpoint(false); // an open window has one, further back
    }
    tokens_.assign(history.begin() + static_cast<std::ptrdiff_t>(memory_.n()), history.end());
    const size_t first_row = tokens_.size() - 1;
    tokens_.insert(tokens_.end(), draft_.tokens.begin(), draft_.tokens.end());
    span_ = memory_.span(tokens_.data(), tokens_.size(), first_row);
    return span_;
}

void Sequence::take(size_t span, int64_t us) {
    memory_.evaluated(span_);
    if (planned_ == Planned::prompt) {
        stats_.us_prefill += us;
        count_evaluated(span_.n);
        const bool is_place =
            memory_.n() + 1 == transcript_.n() || std::binary_search(kept_.begin(), kept_.end(), memory_.n());
        if (is_limited() && step_ == 0 && (is_place || memory_.n() >= memory_.n_kept() + n_between_kept)) {
            checkpoint(true);
        }
        if (config_.all_rows) {
            prompt_span_ = span;
            prompt_row_begin_ = static_cast<int32_t>(span_.n_past);
            prompt_row_end_ = static_cast<int32_t>(memory_.n());
        }
    } else {
        take_step(span, us);
    }
    planned_ = Planned::nothing;
}

void Sequence::take_step(size_t span, int64_t us) {
    const size_t first_row = span_.first_row;
    (step_ == 0 ? stats_.us_prefill : stats_.us_verify) += us;
    count_evaluated(first_row);
    const Stopwatch stopwatch(stats_.us_gate);
    judge_->settle(draft_, step_, [&](size_t i) { return target_->row(span, first_row + i); }, transcript_, stats_);
    stats_.beginnings += step_ == 0 ? 1 : 0;
    stats_.steps++;
    stats_.drafted += static_cast<int64_t>(draft_.tokens.size());
    for (size_t i = 0; i < draft_.tokens.size(); i++) {
        stats_.drafted_at[std::min<size_t>(i, PYFLY_MAX_DEPTH - 1)]++;
    }
    if (transcript_.n() > static_cast<size_t>(target_->n_ctx())) {
        judge_->give_up(transcript_, stats_); // no step can follow that would decide it
    }
    fall_back();
    const std::optional<int64_t> open = judge_->oldest_open();
    if (is_limited() && open && *open >= static_cast<int64_t>(n_before_)) {
        // Later steps may come back to this mismatch from further than the target can rewind. The tokens behind it go
        // with the next step's batch.
        memory_.truncate(static_cast<size_t>(*open));
        checkpoint(false);
    } else {
        memory_.truncate(transcript_.n() - 1);
    }
    step_++;
    transcript_.commit(open.value_or(static_cast<int64_t>(transcript_.n())), stats_);
    counts_step_ = true;
}

// A mismatch that the target could not come back to after another step is not left open: its window falls back to the
// step.
void Sequence::fall_back() {
    const std::optional<int64_t> open = judge_->oldest_open();
    if (open &&
        !target_->can_return(memory_.sequence(), static_cast<int32_t>(*open), static_cast<int32_t>(draft_max()) + 1)) {
        stats_.window_fallbacks++;
        judge_->give_up(transcript_, stats_);
    }
}

void Sequence::postpone() {
    memory_.failed();
    planned_ = Planned::nothing;
}

void Sequence::fail(bool has_evaluated) {
    is_active_ = false;
    is_broken_ = !has_evaluated;
    if (planned_ == Planned::step) {
        // The request ends here, but the target's memory stays a true prefix of it.
        transcript_.abandon(n_before_);
        memory_.truncate(n_before_ - 1);
    }
    memory_.failed();
    planned_ = Planned::nothing;
}

const float * Sequence::prompt_row(int32_t position) const {
    if (position < prompt_row_begin_ || position >= prompt_row_end_) {
        return nullptr;
    }
    return target_->row(prompt_span_, static_cast<size_t>(position - prompt_row_begin_));
}

// Leaves n positions in the target's memory, for others to use. What it does not hold of them is evaluated, unless that
// has just failed.
void Sequence::keep(size_t n) {
    memory_.truncate(n);
    if (!is_broken_) {
        catch_up(std::min(n, transcript_.n()));
    }
    memory_.settle();
}

void Sequence::park(size_t n_keep) {
    if (has_request_) {
        prompt_row_begin_ = prompt_row_end_ = 0;
        keep(n_keep);
    }
}

void Sequence::end(size_t n_keep) {
    const size_t n_committed = transcript_.n_committed();
    is_active_ = false;
    judge_.reset(); // its sampler may hold callbacks that live no longer than the request
    transcript_.end();
    prompt_row_begin_ = prompt_row_end_ = 0;
    if (!has_request_) {
        return;
    }
    if (n_keep != everything) {
        uncount(n_keep + 1); // the caller has the token behind what is kept
    }
    try { // drafters see what is evaluated of a request
        if (n_keep == everything) {
            memory_.truncate(n_committed);
            memory_.settle();
        } else {
            keep(n_keep);
        }
    } catch (...) {
        has_request_ = false;
        throw;
    }
    has_request_ = false;
}

} // namespace pyfly
