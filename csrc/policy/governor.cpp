#include "governor.h"

#include <algorithm>
#include <limits>
#include <string>

#include "error.h"

namespace pyfly {

Governor::Arm::Arm(const Settings & settings)
    : tokens(CostCurve::from_zero(settings.costs)),
      requests(CostCurve::from_one(settings.prior_slope, {0.0, settings.costs.own, settings.costs.most})),
      acceptance(settings.acceptance), confidence(settings.confidence) {
    requests.expect(1, 1.0);
}

Governor::Governor(Settings settings)
    : settings_(settings), target_(CostCurve::from_one(settings.prior_slope, settings.costs)), saved_(settings.stock),
      credit_(settings.credit) {}

Governor::Arm & Governor::arm(int32_t drafter) {
    if (drafter < 0 || drafter >= PYFLY_MAX_DRAFTERS) {
        throw Error(PYFLY_STATUS_INTERNAL, "the governor knows no drafter " + std::to_string(drafter));
    }
    const size_t i = static_cast<size_t>(drafter);
    while (i >= arms_.size()) {
        arms_.emplace_back(settings_);
    }
    return arms_[i];
}

void Governor::expect(int32_t drafter, bool is_free, double relative_cost, bool is_at_once) {
    Arm & a = arm(drafter);
    if (is_at_once) {
        a.tokens = CostCurve::from_one(settings_.prior_slope, settings_.costs);
    }
    a.is_free = is_free;
    a.is_at_once = is_at_once;
    a.relative_cost = relative_cost;
}

void Governor::expect_costs(const MeasuredCosts & costs) {
    for (const auto & rows : costs.target) {
        target_.expect(rows.n, rows.us);
    }
    change_us_ = costs.change_us;
    for (const auto & draft : costs.drafts) {
        if (draft.n_requests == 1) {
            arm(draft.drafter).tokens.expect(draft.k, draft.us);
        }
    }
    for (const auto & draft : costs.drafts) {
        Arm & a = arm(draft.drafter);
        if (draft.n_requests > 1 && a.tokens.is_known()) {
            a.requests.expect(draft.n_requests, draft.us / a.tokens.at(draft.k));
        }
    }
    for (const auto & catch_up : costs.catch_up) {
        arm(catch_up.drafter).us_per_caught_up = catch_up.us;
    }
}

// A batch of n_rows, on average, for n_requests, behind the last one, and what it adds to the next.
double Governor::batch_us(double n_rows, int32_t n_requests) const {
    const double before = n_rows_last_ == 0 || n_rows == n_rows_last_ ? 0.0 : change_us_;
    const double after = n_rows == n_requests ? 0.0 : change_us_ * (1.0 - stays_);
    return target_.at_mean(n_rows) + before + after;
}

// Of k tokens for one request.
double Governor::draft_us(const Arm & a, int32_t k) const {
    if (a.is_free) {
        return 0.0;
    }
    return a.tokens.is_known() ? a.tokens.at(k) : a.relative_cost * target_.at(1) * k;
}

// Of the k-th of these tokens.
double Governor::last_us(const Arm & a, int32_t k) const {
    return std::max(draft_us(a, k) - (k > 1 ? draft_us(a, k - 1) : 0.0), 0.0);
}

// An iteration in which all requests draft k tokens with it.
double Governor::iteration_us(const Arm & a, int32_t k, int32_t n_requests) const {
    return target_.at(n_requests + n_requests * k) + draft_us(a, k) * a.requests.at(n_requests);
}

// Of all tokens that it is behind. Before it was measured: as if they were rows of a target so small.
double Governor::catch_up_us(const Arm & a, int64_t n_behind) const {
    if (n_behind < 1) {
        return 0.0;
    }
    const double n = static_cast<double>(n_behind);
    return a.us_per_caught_up > 0.0 ? n * a.us_per_caught_up
                                    : draft_us(a, 1) * (1.0 + settings_.prior_slope * (n - 1.0));
}

Governor::Options Governor::weigh(const std::vector<Candidate> & candidates) const {
    Options options;
    for (const Candidate & candidate : candidates) {
        options.begin.push_back(options.all.size());
        for (const Offer & offer : candidate.offers) {
            const Arm & a = arms_[static_cast<size_t>(offer.drafter)];
            Option & option = options.all.emplace_back();
            option.drafter = offer.drafter;
            option.k_max = std::min(offer.k_max, PYFLY_MAX_DEPTH);
            option.catch_up_us = catch_up_us(a, offer.n_behind) / settings_.stay;
            a.acceptance.reach(candidate.slot, offer.proposal_class, option.k_max, option.reached.data());
            a.acceptance.lengths(candidate.slot, option.k_max, option.drafted.data(), option.verified.data());
        }
    }
    options.begin.push_back(options.all.size());
    return options;
}

Governor::Plan Governor::plain(size_t n_requests) const {
    const double n = static_cast<double>(n_requests);
    return {std::vector<const Option *>(n_requests), std::vector<int32_t>(n_requests), 0, n,
            batch_us(n, static_cast<int32_t>(n_requests))};
}

// Of each request, the drafter that earns most where a microsecond is worth `speed` tokens, as if all requests did
// likewise.
std::vector<const Governor::Option *> Governor::assign(const Options & options, double speed) const {
    const int32_t n_requests = static_cast<int32_t>(options.begin.size()) - 1;
    std::vector<const Option *> assigned(static_cast<size_t>(n_requests));
    for (size_t request = 0; request < assigned.size(); request++) {
        double most = -std::numeric_limits<double>::infinity();
        for (size_t i = options.begin[request]; i < options.begin[request + 1]; i++) {
            const Option & option = options.all[i];
            const Arm & a = arms_[static_cast<size_t>(option.drafter)];
            const double share = a.requests.at(n_requests) / n_requests; // of a draft's cost
            double tokens = 0.0, rows = 0.0, drafts_us = 0.0;
            for (int32_t k = 1; k <= option.k_max; k++) {
                const size_t depth = static_cast<size_t>(k) - 1;
                tokens += option.reached[depth];
                rows += option.verified[depth];
                drafts_us += option.drafted[depth] * last_us(a, k);
                const double rows_us =
                    (target_.at_mean(n_requests + n_requests * rows) - target_.at(n_requests)) / n_requests;
                const double us = rows_us + drafts_us * share + option.catch_up_us;
                if (tokens - speed * us > most) {
                    most = tokens - speed * us;
                    assigned[request] = &option;
                }
            }
        }
    }
    return assigned;
}

// The next row goes to the request where it earns most, until there is none left; of all numbers of rows the best one
// counts. C is a staircase: the first dip is not the end.
Governor::Plan Governor::walk(std::vector<const Option *> assigned, double speed) const {
    struct Depth {
        int32_t n_requests = 0; // that draft so deep
        double step_us = 0;     // for one request
        double next_us = 0;     // for one request more
    };
    constexpr double nothing = -std::numeric_limits<double>::infinity();
    const size_t n_requests = assigned.size();
    Plan best = plain(n_requests);
    std::vector<std::vector<Depth>> depths(arms_.size());
    std::vector<int32_t> k(n_requests);
    std::vector<double> us(n_requests), worth(n_requests, nothing); // of each request's next row
    const auto weigh_next = [&](size_t request) {
        const Option & option = *assigned[request];
        const size_t depth = static_cast<size_t>(k[request]);
        if (k[request] == option.k_max) {
            worth[request] = nothing;
            return;
        }
        us[request] = option.drafted[depth] * depths[static_cast<size_t>(option.drafter)][depth].next_us +
                      (depth == 0 ? option.catch_up_us : 0.0);
        worth[request] = option.reached[depth] - speed * us[request];
    };
    for (size_t request = 0; request < n_requests; request++) {
        if (const Option * option = assigned[request]) {
            const Arm & a = arms_[static_cast<size_t>(option->drafter)];
            auto & of_arm = depths[static_cast<size_t>(option->drafter)];
            while (static_cast<int32_t>(of_arm.size()) < option->k_max) {
                const int32_t depth = static_cast<int32_t>(of_arm.size());
                const double step = last_us(a, depth + 1);
                of_arm.push_back({0, step, step});
            }
            weigh_next(request);
        }
    }
    std::vector<size_t> order; // the request of each row
    double tokens = best.tokens, us_drafts = 0.0, n_rows = static_cast<double>(n_requests);
    size_t n_best = 0;
    while (true) {
        const size_t next = static_cast<size_t>(std::max_element(worth.begin(), worth.end()) - worth.begin());
        if (worth[next] == nothing) {
            break;
        }
        const Option & option = *assigned[next];
        const Arm & a = arms_[static_cast<size_t>(option.drafter)];
        const int32_t before = k[next]++;
        tokens += option.reached[static_cast<size_t>(before)];
        us_drafts += us[next];
        n_rows += option.verified[static_cast<size_t>(before)];
        order.push_back(next);
        weigh_next(next);
        if (!a.is_free) {
            Depth & depth = depths[static_cast<size_t>(option.drafter)][static_cast<size_t>(before)];
            depth.n_requests++;
            depth.next_us = depth.step_us * (a.requests.at(depth.n_requests + 1) - a.requests.at(depth.n_requests));
            for (size_t request = 0; request < n_requests; request++) {
                if (k[request] == before && assigned[request] && assigned[request]->drafter == option.drafter) {
                    weigh_next(request);
                }
            }
        }
        const double all_us = batch_us(n_rows, static_cast<int32_t>(n_requests)) + us_drafts;
        if (tokens * best.us > best.tokens * all_us) {
            best.tokens = tokens;
            best.us = all_us;
            n_best = order.size();
        }
    }
    for (size_t i = 0; i < n_best; i++) {
        best.k[order[i]]++;
    }
    best.n_rows = static_cast<int32_t>(n_best);
    best.options = std::move(assigned);
    return best;
}

// Whether an iteration in which all requests draft with it could pay if all drafts were accepted.
bool Governor::could_pay(const Arm & a, int32_t k_max, int32_t n_requests, double extra_us) const {
    const double plain_us = settings_.hysteresis * target_.at(n_requests);
    for (int32_t k = 1; k <= std::min(k_max, PYFLY_MAX_DEPTH); k++) {
        if (plain_us * (k + 1) > iteration_us(a, k, n_requests) + extra_us) {
            return true;
        }
    }
    return false;
}

// If all requests draft with it, every token of each costs less: as much as is believed of the acceptance, or, where
// that was not seen yet or was saved up for, as may be hoped. All wait for each that is followed, and others join and
// leave.
bool Governor::pays_to_follow(int32_t slot, int32_t drafter, int32_t k_max, int32_t n_requests, int64_t n_behind) {
    Arm & a = arm(drafter);
    const double price = catch_up_us(a, n_behind);
    const bool is_first = !a.acceptance.was_seen() && (a.first_slot < 0 || a.first_slot == slot);
    const bool is_trial = a.us_per_caught_up > 0.0 && (is_first || price < saved_ * target_.at(1));
    std::array<double, PYFLY_MAX_DEPTH> at_depth, drafted, verified;
    a.acceptance.of_all(PYFLY_MAX_DEPTH, at_depth.data());
    a.acceptance.lengths(-1, PYFLY_MAX_DEPTH, drafted.data(), verified.data());
    double tokens = 1.0, reached = 1.0, gain_us = 0.0, rows = 0.0, drafts_us = 0.0;
    for (int32_t k = 1; k <= std::min(k_max, PYFLY_MAX_DEPTH); k++) {
        const size_t depth = static_cast<size_t>(k) - 1;
        reached *= is_trial ? settings_.hope : at_depth[depth];
        tokens += reached;
        rows += is_trial ? 1.0 : verified[depth];
        drafts_us += (is_trial ? 1.0 : drafted[depth]) * last_us(a, k);
        const double us = settings_.hysteresis *
                          (target_.at_mean(n_requests + n_requests * rows) + drafts_us * a.requests.at(n_requests));
        gain_us = std::max(gain_us, target_.at(n_requests) - us / tokens);
    }
    const bool pays = settings_.length * gain_us > n_requests * price * (n_requests > 1 ? settings_.beside : 1.0);
    if (pays && is_trial && is_first) {
        a.first_slot = slot;
    }
    return pays;
}

// One request whose drafter does not seem to pay tries it nevertheless, if that has been saved up for: what is believed
// of its acceptance may be wrong by now. Every token that passes makes it dearer, because the drafter has to catch up.
void Governor::explore(const std::vector<Candidate> & candidates, const Plan & plan, std::vector<Choice> & choices) {
    const int32_t n_requests = static_cast<int32_t>(candidates.size());
    const int32_t n_rows = n_requests + plan.n_rows;
    const double before = batch_us(n_rows, n_requests);
    const double affordable = credit_ * target_.at(1);
    double least = 0.0, price = 0.0;
    Choice trial;
    size_t tried = 0;
    for (size_t i = 0; i < candidates.size(); i++) {
        for (const Offer & offer : candidates[i].offers) {
            const Arm & a = arms_[static_cast<size_t>(offer.drafter)];
            const double catch_up = catch_up_us(a, offer.n_behind);
            if (a.is_free || choices[i].k > 0 ||
                !could_pay(a, offer.k_max, n_requests, n_requests * catch_up / settings_.stay)) {
                continue;
            }
            double reached[PYFLY_MAX_DEPTH], tokens = 0.0;
            const int32_t k_max = std::min({offer.k_max, settings_.trial, PYFLY_MAX_DEPTH});
            a.acceptance.reach(candidates[i].slot, offer.proposal_class, k_max, reached);
            for (int32_t k = 1; k <= k_max; k++) {
                tokens += reached[k - 1];
                const double us = batch_us(n_rows + k, n_requests) - before + draft_us(a, k) + catch_up;
                const double loss = us - tokens * us_per_token_;
                if (loss < affordable && (trial.k == 0 || k > trial.k || (k == trial.k && loss < least))) {
                    trial = {offer.drafter, k};
                    tried = i;
                    least = loss;
                    price = us;
                }
            }
        }
    }
    if (trial.k > 0) {
        credit_ -= price / target_.at(1);
        choices[tried] = trial;
        tried_slot_ = candidates[tried].slot;
        tried_drafter_ = trial.drafter;
    }
}

std::vector<Choice> Governor::choose(const std::vector<Candidate> & candidates) {
    std::vector<Choice> choices(candidates.size());
    tried_slot_ = -1;
    n_requests_ = static_cast<int32_t>(candidates.size());
    if (candidates.empty()) {
        return choices;
    }
    int32_t most_drafter = -1;
    for (const Candidate & candidate : candidates) {
        for (const Offer & offer : candidate.offers) {
            most_drafter = std::max(most_drafter, offer.drafter);
        }
    }
    if (most_drafter >= 0 && target_.is_known()) {
        arm(most_drafter);
        const Options options = weigh(candidates);
        Plan best = plain(candidates.size());
        best.us /= settings_.hysteresis;
        // Which drafter earns most depends on the speed, and the speed on the drafters: a second look settles
        // it.
        double speed = best.speed();
        for (int32_t look = 0; look < 2; look++) {
            Plan plan = walk(assign(options, speed), speed);
            speed = plan.speed();
            if (speed > best.speed()) {
                best = std::move(plan);
            }
        }
        us_per_token_ = 1.0 / best.speed();
        const int32_t n_more = std::max(best.n_rows, 1);
        row_us_ = (target_.at(n_requests_ + n_more) - target_.at(n_requests_)) / n_more;
        for (size_t i = 0; i < choices.size(); i++) {
            if (best.k[i] > 0) {
                const Arm & a = arms_[static_cast<size_t>(best.options[i]->drafter)];
                const bool ends_itself = a.has_confidence && !a.is_at_once && n_requests_ == 1 && change_us_ == 0.0;
                choices[i] = {best.options[i]->drafter, ends_itself ? best.options[i]->k_max : best.k[i]};
            }
        }
        if (best.n_rows > 0 && ++iterations_since_plain_ >= settings_.plain_every) {
            choices.assign(choices.size(), {});
        } else {
            explore(candidates, best, choices);
        }
    }
    for (const Choice & choice : choices) {
        steps_at_[static_cast<size_t>(choice.k)]++;
    }
    return choices;
}

// Whether the rows of a draft from its n-th token on, of at most k, are worth their time: the n-th is reached with this
// probability, each further one with the probability `next`. is_drafted: the n-th is there already. C is a staircase:
// several rows may pay where one does not.
bool Governor::pays(const Arm & a, int32_t n, int32_t k, double reached, double next, bool is_drafted) const {
    const double share = a.requests.at(n_requests_) / n_requests_;
    double tokens = 0.0, us = 0.0;
    for (; n <= k; n++, reached *= next) {
        tokens += reached;
        us += n_requests_ == 1 ? target_.at(n + 1) - target_.at(n) : row_us_;
        us += is_drafted ? 0.0 : share * last_us(a, n);
        if (tokens * us_per_token_ > us) {
            return true;
        }
        is_drafted = false;
    }
    return false;
}

// Where a change of a batch's size has its price, drafts keep their lengths.
DraftStop Governor::stop(int32_t drafter, int32_t k) {
    if (change_us_ > 0.0 || us_per_token_ <= 0.0) {
        return {};
    }
    return [this, drafter, k, n = 0, reached = 1.0](double p) mutable {
        const Arm & a = arm(drafter);
        const double next = a.confidence.next(p);
        reached *= a.confidence.right(p);
        n++;
        if (!pays(a, n, k, reached, next, true)) {
            return DraftStep::ends_before;
        }
        return pays(a, n + 1, k, reached * next, next, false) ? DraftStep::goes_on : DraftStep::ends_behind;
    };
}

void Governor::begin_request(int32_t slot) {
    for (Arm & a : arms_) {
        a.acceptance.begin_request(slot);
        a.first_slot = a.first_slot == slot ? -1 : a.first_slot;
    }
}

void Governor::observe_target(int32_t n_rows, double us) {
    if (change_us_ == 0.0 || n_rows == n_rows_last_) {
        target_.observe(n_rows, us);
    } else {
        const double change = std::clamp(us - target_.at(n_rows), 0.0, 2.0 * change_us_);
        change_us_ += settings_.change * (change - change_us_);
    }
    if (was_draft_) {
        stays_ += settings_.stays * ((n_rows == n_rows_last_ ? 1.0 : 0.0) - stays_);
    }
    n_rows_last_ = n_rows;
    was_draft_ = n_rows > n_requests_;
    iterations_since_plain_ = was_draft_ ? iterations_since_plain_ : 0;
    credit_ = std::min(credit_ + settings_.spent * us / target_.at(1), settings_.credit);
    saved_ += settings_.spent * us / target_.at(1);
}

void Governor::observe_draft(int32_t drafter, const std::vector<int32_t> & asked, double us) {
    const int32_t deepest = asked.empty() ? 0 : *std::max_element(asked.begin(), asked.end());
    if (deepest < 1) {
        return;
    }
    Arm & a = arm(drafter);
    double expected = 0.0;
    for (int32_t k = 1; k <= deepest; k++) {
        const auto n = std::count_if(asked.begin(), asked.end(), [&](int32_t n_asked) { return n_asked >= k; });
        expected += (a.tokens.at(k) - a.tokens.at(k - 1)) * a.requests.at(static_cast<int32_t>(n));
    }
    const double ratio = us / expected;
    const int32_t n_requests = static_cast<int32_t>(asked.size());
    const bool was_known = a.tokens.is_known();
    a.tokens.observe(deepest, a.tokens.at(deepest) * ratio);
    if (n_requests > 1 && was_known) {
        a.requests.observe(n_requests, a.requests.at(n_requests) * ratio);
    }
}

void Governor::observe_catch_up(int32_t drafter, int64_t n_tokens, double us) {
    if (n_tokens < 1 || !(us > 0.0)) {
        return;
    }
    arm(drafter).us_per_caught_up = us / static_cast<double>(n_tokens);
    if (target_.is_known()) {
        saved_ = std::max(saved_ - us / target_.at(1), 0.0);
    }
}

void Governor::observe_acceptance(int32_t slot, int32_t drafter, int32_t proposal_class, int32_t n_drafted,
                                  int32_t n_accepted) {
    arm(drafter).acceptance.observe(slot, proposal_class, n_drafted, n_accepted);
    refund(slot, drafter, n_accepted);
}

// A trial that was not all rejected.
void Governor::refund(int32_t slot, int32_t drafter, int32_t n_accepted) {
    if (slot == tried_slot_ && drafter == tried_drafter_) {
        credit_ = std::min(credit_ + n_accepted * us_per_token_ / target_.at(1), settings_.credit);
    }
}

void Governor::observe_confidence(int32_t slot, int32_t drafter, const std::vector<float> & confidence, int32_t n_asked,
                                  int32_t n_verified, size_t n_right, bool is_refuted) {
    Arm & a = arm(drafter);
    a.has_confidence = true;
    std::vector<double> reached;
    for (size_t i = 0; i < std::min(confidence.size(), static_cast<size_t>(n_verified)); i++) {
        reached.push_back((i > 0 ? reached.back() : 1.0) * a.confidence.right(confidence[i]));
    }
    a.acceptance.expect(slot, n_asked, reached);
    a.confidence.observe(confidence, n_right, is_refuted);
    refund(slot, drafter, std::min(static_cast<int32_t>(n_right), n_verified));
    a.acceptance.observe_length(slot, n_asked, static_cast<int32_t>(confidence.size()), n_verified);
    steps_at_[static_cast<size_t>(n_asked)]--;
    steps_at_[static_cast<size_t>(n_verified)]++;
}

void Governor::state(pyfly_governor_state & out) const {
    out = {};
    for (int32_t i = 0; i <= PYFLY_MAX_DEPTH; i++) {
        const size_t at = static_cast<size_t>(i);
        out.target_us[at] = target_.is_known() ? target_.at(i + 1) : 0.0;
        out.steps_at[at] = steps_at_[at];
    }
    for (size_t drafter = 0; drafter < std::min<size_t>(arms_.size(), PYFLY_MAX_DRAFTERS); drafter++) {
        const Arm & a = arms_[drafter];
        a.acceptance.of_all(PYFLY_MAX_DEPTH, out.acceptance + drafter * PYFLY_MAX_DEPTH);
        out.catch_up_us[drafter] = a.us_per_caught_up;
        for (int32_t k = 1; k <= PYFLY_MAX_DEPTH && a.tokens.is_known(); k++) {
            out.draft_us[drafter * PYFLY_MAX_DEPTH + static_cast<size_t>(k) - 1] = a.tokens.at(k);
        }
    }
}

} // namespace pyfly
