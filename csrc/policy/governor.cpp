#include "governor.h"

#include <algorithm>
#include <limits>

namespace pyfly {

Governor::Arm::Arm(const Settings & settings)
    : tokens(CostCurve::from_zero(settings.costs)),
      texts(CostCurve::from_one(settings.prior_slope_texts,
                                {0.0, settings.costs.own, settings.costs.most, settings.costs.trusted})),
      acceptance(settings.model) {
    texts.expect(1, 1.0);
}

Governor::Governor(Settings settings)
    : settings_(settings), target_(CostCurve::from_one(settings.prior_slope, settings.costs)),
      credit_(settings.credit) {}

const Governor::Arm * Governor::arm(int32_t drafter) const {
    const size_t i = static_cast<size_t>(drafter);
    return i < arms_.size() ? &arms_[i] : nullptr;
}

Governor::Arm & Governor::arm(int32_t drafter) {
    const size_t i = static_cast<size_t>(drafter);
    while (i >= arms_.size()) {
        arms_.emplace_back(settings_);
    }
    return arms_[i];
}

void Governor::expect(int32_t drafter, bool is_free, double relative_cost) {
    Arm & a = arm(drafter);
    a.is_free = is_free;
    a.relative_cost = relative_cost;
    a.acceptance = Acceptance(is_free ? settings_.free : settings_.model);
}

void Governor::expect_costs(const MeasuredCosts & costs) {
    for (const auto & rows : costs.target) {
        target_.expect(rows.n, rows.us);
    }
    for (const auto & draft : costs.drafts) {
        if (draft.n_texts == 1) {
            arm(draft.drafter).tokens.expect(draft.k, draft.us);
        }
    }
    for (const auto & draft : costs.drafts) {
        Arm & a = arm(draft.drafter);
        if (draft.n_texts > 1 && a.tokens.is_known()) {
            a.texts.expect(draft.n_texts, draft.us / a.tokens.at(draft.k));
        }
    }
    for (const auto & catch_up : costs.catch_up) {
        arm(catch_up.drafter).us_per_caught_up = catch_up.us;
    }
}

// Of k tokens for one text.
double Governor::draft_us(const Arm & a, int32_t k) const {
    if (a.is_free) {
        return 0.0;
    }
    return a.tokens.is_known() ? a.tokens.at(k) : a.relative_cost * target_.at(1) * k;
}

// Of all tokens that it is behind. Before it was measured: what drafting them would cost.
double Governor::catch_up_us(const Offer & offer) const {
    const Arm * a = arm(offer.drafter);
    if (a == nullptr || offer.n_behind < 1) {
        return 0.0;
    }
    return static_cast<double>(offer.n_behind) * (a->us_per_caught_up > 0.0 ? a->us_per_caught_up : draft_us(*a, 1));
}

Governor::Options Governor::weigh(const std::vector<Candidate> & candidates) const {
    Options options;
    for (const Candidate & candidate : candidates) {
        options.begin.push_back(options.all.size());
        for (const Offer & offer : candidate.offers) {
            Option & option = options.all.emplace_back();
            option.drafter = offer.drafter;
            option.k_max = std::min(offer.k_max, PYFLY_MAX_DEPTH);
            option.catch_up_us = catch_up_us(offer) / settings_.stay;
            arm(offer.drafter)
                ->acceptance.reach(candidate.text, offer.proposal_class, option.k_max, option.reached.data());
        }
    }
    options.begin.push_back(options.all.size());
    return options;
}

Governor::Plan Governor::plain(size_t n_texts, int32_t n_rows) const {
    return {std::vector<const Option *>(n_texts), std::vector<int32_t>(n_texts), 0, static_cast<double>(n_texts),
            target_.at(n_rows)};
}

// Which drafter each text is offered to the walk with: the preferred one if it has that, or else the one that earns most at the speed of
// plain decoding, as if all texts did likewise.
std::vector<const Governor::Option *> Governor::assign(const Options & options, int32_t preferred,
                                                       int32_t n_rows) const {
    const int32_t n_texts = static_cast<int32_t>(options.begin.size()) - 1;
    const double speed = n_texts / target_.at(n_rows);
    std::vector<const Option *> assigned(static_cast<size_t>(n_texts));
    for (size_t text = 0; text < assigned.size(); text++) {
        double most = -std::numeric_limits<double>::infinity();
        for (size_t i = options.begin[text]; i < options.begin[text + 1]; i++) {
            const Option & option = options.all[i];
            if (option.drafter == preferred) {
                assigned[text] = &option;
                break;
            }
            const Arm & a = *arm(option.drafter);
            double tokens = 0.0;
            for (int32_t k = 1; k <= option.k_max; k++) {
                tokens += option.reached[static_cast<size_t>(k) - 1];
                const double rows_us = (target_.at(n_rows + n_texts * k) - target_.at(n_rows)) / n_texts;
                const double us = rows_us + draft_us(a, k) * a.texts.at(n_texts) / n_texts + option.catch_up_us;
                if (tokens - speed * us > most) {
                    most = tokens - speed * us;
                    assigned[text] = &option;
                }
            }
        }
    }
    return assigned;
}

// The next row goes to the text where it earns most, until there is none left; of all numbers of rows the best one
// counts. C is a staircase: the first dip is not the end.
Governor::Plan Governor::walk(std::vector<const Option *> assigned, int32_t n_rows) const {
    const size_t n_texts = assigned.size();
    Plan best = plain(n_texts, n_rows);
    const double speed = best.speed();
    double tokens = best.tokens, us_drafts = 0.0;
    std::vector<int32_t> k(n_texts);
    std::vector<double> us(n_texts), worth(n_texts);
    std::vector<std::array<int32_t, PYFLY_MAX_DEPTH>> n_at(arms_.size()); // texts that draft at each depth
    const auto weigh_next = [&](size_t text) {
        const Option * option = assigned[text];
        if (option == nullptr || k[text] >= option->k_max) {
            worth[text] = -std::numeric_limits<double>::infinity();
            return;
        }
        const Arm & a = arms_[static_cast<size_t>(option->drafter)];
        const size_t depth = static_cast<size_t>(k[text]);
        const int32_t n = n_at[static_cast<size_t>(option->drafter)][depth];
        const double step = a.is_free ? 0.0 : draft_us(a, k[text] + 1) - draft_us(a, k[text]);
        us[text] = std::max(step, 0.0) * (a.texts.at(n + 1) - a.texts.at(n)) + (k[text] == 0 ? option->catch_up_us : 0);
        worth[text] = option->reached[depth] - speed * us[text];
    };
    for (size_t text = 0; text < n_texts; text++) {
        weigh_next(text);
    }
    std::vector<size_t> order;
    size_t n_best = 0;
    while (true) {
        const size_t next =
            static_cast<size_t>(std::max_element(worth.begin(), worth.end()) - worth.begin());
        const Option * option = assigned[next];
        if (option == nullptr || k[next] >= option->k_max) {
            break;
        }
        const int32_t depth = k[next]++;
        tokens += option->reached[static_cast<size_t>(depth)];
        us_drafts += us[next];
        n_at[static_cast<size_t>(option->drafter)][static_cast<size_t>(depth)]++;
        order.push_back(next);
        for (size_t text = 0; text < n_texts; text++) {
            if (text == next || (k[text] == depth && assigned[text] && assigned[text]->drafter == option->drafter)) {
                weigh_next(text);
            }
        }
        const double all_us = target_.at(n_rows + static_cast<int32_t>(order.size())) + us_drafts;
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

// Whether a step in which all texts draft with it could pay if nearly all drafts were accepted.
bool Governor::could_pay(int32_t drafter, int32_t k_max, int32_t n_texts, int32_t n_rows, double extra_us) const {
    const Arm * a = arm(drafter);
    const double plain_us = settings_.hysteresis * target_.at(n_rows);
    double tokens = 1.0, reached = 1.0;
    for (int32_t k = 1; k <= std::min(k_max, PYFLY_MAX_DEPTH); k++) {
        reached *= settings_.optimistic;
        tokens += reached;
        const double drafting = a ? draft_us(*a, k) * a->texts.at(n_texts) : 0.0;
        if (plain_us * tokens > target_.at(n_rows + n_texts * k) + drafting + extra_us) {
            return true;
        }
    }
    return false;
}

bool Governor::can_pay(int32_t, int32_t drafter, int32_t k_max) const {
    return could_pay(drafter, k_max, 1, 1, 0.0) || could_pay(drafter, k_max, n_texts_, n_texts_, 0.0);
}

// One text whose drafter does not seem to pay tries it nevertheless, if that has been saved up for: what is believed of
// its acceptance may be wrong by now. Every token that passes makes it dearer, because the drafter has to catch up.
void Governor::explore(const std::vector<Candidate> & candidates, int32_t n_rows, const Plan & plan,
                       std::vector<Choice> & choices) {
    const int32_t n_texts = static_cast<int32_t>(candidates.size());
    double price = credit_ * target_.at(1);
    Choice trial;
    size_t tried = 0;
    for (size_t i = 0; i < candidates.size(); i++) {
        for (const Offer & offer : candidates[i].offers) {
            const Arm & a = arms_[static_cast<size_t>(offer.drafter)];
            if (a.is_free || choices[i].k > 0) {
                continue;
            }
            const int32_t k = std::min(offer.k_max, settings_.trial);
            const double catch_up = catch_up_us(offer);
            const double us = target_.at(n_rows + plan.n_rows + k) - target_.at(n_rows + plan.n_rows) + draft_us(a, k) +
                              catch_up;
            if (us < price &&
                could_pay(offer.drafter, offer.k_max, n_texts, n_rows, n_texts * catch_up / settings_.stay)) {
                price = us;
                trial = {offer.drafter, k};
                tried = i;
            }
        }
    }
    if (trial.k > 0) {
        credit_ -= price / target_.at(1);
        choices[tried] = trial;
        tried_text_ = candidates[tried].text;
        tried_drafter_ = trial.drafter;
    }
}

std::vector<Choice> Governor::choose(const std::vector<Candidate> & candidates, int64_t n_other_rows) {
    std::vector<Choice> choices(candidates.size());
    tried_text_ = -1;
    if (candidates.empty()) {
        return choices;
    }
    n_texts_ = static_cast<int32_t>(candidates.size());
    int32_t most_drafter = -1;
    for (const Candidate & candidate : candidates) {
        for (const Offer & offer : candidate.offers) {
            most_drafter = std::max(most_drafter, offer.drafter);
        }
    }
    if (most_drafter >= 0 && target_.is_known()) {
        arm(most_drafter);
        const int32_t n_rows = static_cast<int32_t>(std::min<int64_t>(n_texts_ + n_other_rows, CostCurve::n_max));
        const Options options = weigh(candidates);
        Plan best = plain(candidates.size(), n_rows);
        best.us /= settings_.hysteresis;
        std::vector<std::vector<const Option *>> tried;
        for (int32_t preferred = settings_.mixed ? -1 : 0; preferred <= most_drafter; preferred++) {
            std::vector<const Option *> assigned = assign(options, preferred, n_rows);
            if (std::find(tried.begin(), tried.end(), assigned) == tried.end()) {
                tried.push_back(assigned);
                Plan plan = walk(std::move(assigned), n_rows);
                if (plan.speed() > best.speed()) {
                    best = std::move(plan);
                }
            }
        }
        for (size_t i = 0; i < choices.size(); i++) {
            if (best.k[i] > 0) {
                choices[i] = {best.options[i]->drafter, best.k[i]};
            }
        }
        if (best.n_rows > 0 && ++steps_since_plain_ >= settings_.plain_every) {
            choices.assign(choices.size(), {});
            best.n_rows = 0;
        } else {
            explore(candidates, n_rows, best, choices);
        }
        if (best.n_rows == 0) {
            steps_since_plain_ = 0;
        }
    }
    for (const Choice & choice : choices) {
        rounds_at_[static_cast<size_t>(choice.k)]++;
    }
    return choices;
}

void Governor::begin_text(int32_t text) {
    for (Arm & a : arms_) {
        a.acceptance.begin_text(text);
    }
}

void Governor::observe_target(int32_t n_rows, double us) {
    target_.observe(n_rows, us);
    credit_ = std::min(credit_ + settings_.spent * us / target_.at(1), settings_.credit);
}

void Governor::observe_draft(int32_t drafter, const std::vector<int32_t> & asked, double us) {
    if (asked.empty()) {
        return;
    }
    Arm & a = arm(drafter);
    const int32_t deepest = *std::max_element(asked.begin(), asked.end());
    double expected = 0.0;
    for (int32_t k = 1; k <= deepest; k++) {
        const auto n = std::count_if(asked.begin(), asked.end(), [&](int32_t n_asked) { return n_asked >= k; });
        expected += (a.tokens.at(k) - a.tokens.at(k - 1)) * a.texts.at(static_cast<int32_t>(n));
    }
    const double ratio = us / expected;
    const int32_t n_texts = static_cast<int32_t>(asked.size());
    a.tokens.observe(deepest, a.tokens.at(deepest) * ratio);
    if (n_texts > 1) {
        a.texts.observe(n_texts, a.texts.at(n_texts) * ratio);
    }
}

void Governor::observe_catch_up(int32_t drafter, int64_t n_tokens, double us) {
    if (n_tokens < 1 || !(us > 0.0)) {
        return;
    }
    double & estimate = arm(drafter).us_per_caught_up;
    const double cost = us / static_cast<double>(n_tokens);
    estimate = estimate == 0.0 ? cost : estimate + settings_.catch_up_rate * (cost - estimate);
}

void Governor::observe_acceptance(int32_t text, int32_t drafter, int32_t proposal_class, int32_t n_drafted,
                                  int32_t n_accepted) {
    arm(drafter).acceptance.observe(text, proposal_class, n_drafted, n_accepted);
    if (text == tried_text_ && drafter == tried_drafter_) { // it was not all rejected
        credit_ = std::min(credit_ + n_accepted * target_.at(n_texts_) / n_texts_ / target_.at(1), settings_.credit);
    }
}

void Governor::state(pyfly_governor_state & out) const {
    out = {};
    for (int32_t i = 0; i <= PYFLY_MAX_DEPTH; i++) {
        const size_t at = static_cast<size_t>(i);
        out.target_us[at] = target_.is_known() ? target_.at(i + 1) : 0.0;
        out.rounds_at[at] = rounds_at_[at];
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
