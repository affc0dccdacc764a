#include "governor.h"

#include <algorithm>
#include <cmath>

namespace pyfly {

namespace {

constexpr double decay = 0.9;            // of acceptance counts per observation: a memory of ten rounds
constexpr double unlikely = 0.02;        // a run of equal outcomes less likely than this: the text has changed
constexpr double forget = 0.2;           // what is kept of the counts then
constexpr double carry_over = 0.3;       // what is kept of them when another text begins
constexpr double catch_up_rate = 0.3;    // weight of a new time of catching up
constexpr double optimistic = 0.97;      // acceptance at which a drafter that cannot pay is left alone
constexpr double plausible = 0.9;        // the same before it was tried: what it costs is only guessed
constexpr double hysteresis = 1.04;      // gain over plain decoding that drafting must promise
constexpr int32_t first_k = 3;           // draft length of the round that measures the slope of C
constexpr double promising = 0.6;        // acceptance of a free drafter that is worth an attempt
constexpr double spent_on_plain = 0.005; // of the time, at most, on measuring C(1) again while drafting
constexpr double least_rounds = 8, most_rounds = 128; // between two such measurements
constexpr int64_t most_patience = 4096;
constexpr double stay = 10.0;             // rounds that a drafter which catches up is expected to stay, at most
constexpr double spent_on_retries = 0.02; // of a text's time, at most, on models that do not seem to pay
constexpr double worth_a_retry = 0.95;    // acceptance at which one must pay to be worth that
constexpr double rest_of_long = 0.3;      // of a text that is longer than usual, that is still to come
constexpr double length_rate = 0.4;       // weight of a text's length in the usual one
constexpr double doubt = 0.5;             // share of a model's cost by which its first time may be too long

// What is believed of a drafter's acceptance before it was seen, and how many observations that weighs. A drafter that
// must be tried to be known gets credit; what a free one would have achieved is seen without trying.
struct Prior {
    double acceptance, weight;
};
constexpr double most_expected = 0.9; // of a depth, from the depth before it: one long proposal is one observation
constexpr Prior prior_of_model = {0.7, 0.5}, prior_of_free = {0.4, 1.5};
constexpr Prior hope = {0.8, 2.5}; // of a model in a new text: it is not behind then, and dear to come back to later

} // namespace

const Governor::Arm * Governor::arm(int32_t drafter) const {
    const size_t i = static_cast<size_t>(drafter);
    return i < arms_.size() ? &arms_[i] : nullptr;
}

Governor::Arm & Governor::arm(int32_t drafter) {
    const size_t i = static_cast<size_t>(drafter);
    if (i >= arms_.size()) {
        arms_.resize(i + 1);
    }
    return arms_[i];
}

void Governor::expect(int32_t drafter, bool is_free, double relative_cost) {
    arm(drafter).is_free = is_free;
    arm(drafter).expected_cost = relative_cost;
}

double Governor::target_cost(int32_t n_rows) const {
    return target_.is_known(1) ? target_.at(n_rows) : 0.0;
}

double Governor::draft_cost(int32_t drafter, int32_t k) const {
    const Arm * a = arm(drafter);
    return a && a->draft.n_measured() > 0 ? a->draft.at(k) : 0.0;
}

double Governor::catch_up_cost(int32_t drafter) const {
    const Arm * a = arm(drafter);
    return a ? a->us_per_caught_up : 0.0;
}

// In microseconds; in units of C(1) before that was measured.
double Governor::cost(int32_t n_rows) const {
    return target_.is_known(1) ? target_.at(n_rows) : 1.0 + prior_slope * (n_rows - 1);
}

// In the unit of cost(); before it was measured, what is expected.
double Governor::cost_of_drafting(int32_t drafter, int32_t k) const {
    const Arm * a = arm(drafter);
    if (a == nullptr || a->is_free) {
        return 0.0;
    }
    const bool is_measured = a->draft.n_measured() > 0 && target_.is_known(1);
    return is_measured ? a->draft.at(k) : a->expected_cost * cost(1) * k;
}

// Depths that were hardly seen take after the depth before them.
double Governor::acceptance(int32_t drafter, int32_t proposal_class, int32_t depth) const {
    const Arm * a = arm(drafter);
    const Prior prior = a && a->is_free ? prior_of_free : prior_of_model;
    double estimate = prior.acceptance;
    if (a == nullptr) {
        return estimate;
    }
    const Acceptance & counts = a->classes[static_cast<size_t>(std::clamp(proposal_class, 0, n_classes - 1))];
    for (int32_t i = 0; i < std::min(depth, PYFLY_MAX_DEPTH); i++) {
        const size_t at = static_cast<size_t>(i);
        estimate =
            (counts.accepted[at] + prior.weight * std::min(estimate, most_expected)) / (counts.seen[at] + prior.weight);
    }
    return estimate;
}

double Governor::acceptance(int32_t drafter, int32_t depth) const {
    const Arm * a = arm(drafter);
    if (a == nullptr) {
        return prior_of_model.acceptance;
    }
    const auto commonest = std::max_element(a->classes.begin(), a->classes.end(),
                                            [](const auto & x, const auto & y) { return x.seen[0] < y.seen[0]; });
    return acceptance(drafter, static_cast<int32_t>(commonest - a->classes.begin()), depth);
}

// Of all tokens that it is behind. Before it was measured: what drafting them would cost.
double Governor::cost_of_catching_up(const Offer & offer) const {
    const double measured = catch_up_cost(offer.drafter);
    return static_cast<double>(offer.n_behind) * (measured > 0.0 ? measured : cost_of_drafting(offer.drafter, 1));
}

// Tokens of the text that are still to come, as far as that can be guessed.
double Governor::rest() const {
    return std::max(n_typical_ - n_text_, rest_of_long * n_text_);
}

// Rounds that catching up is spread over, when each yields so many tokens.
double Governor::rounds_to_stay(double tokens) const {
    return std::clamp(rest() / tokens, 1.0, stay);
}

// What is believed of a model's cost beyond plain decoding when it is given a chance: the fewer times it was measured,
// the more of them may have been too long.
double Governor::believed_share(int32_t drafter) const {
    const Arm * a = arm(drafter);
    const int64_t n = a ? a->draft.n_measured() : 0;
    return n > 0 ? 1.0 - doubt / static_cast<double>(n) : 1.0;
}

// The largest v(a, k), in tokens per microsecond; with `hoped_for`, as if every draft were accepted with that
// probability, at what is believed of its cost.
Governor::Choice Governor::best(const std::vector<Offer> & offers, std::optional<double> hoped_for) const {
    Choice choice;
    choice.speed = hysteresis / cost(1);
    for (const Offer & offer : offers) {
        const double share = hoped_for ? believed_share(offer.drafter) : 1.0;
        double tokens = 1.0, reached = 1.0;
        for (int32_t k = 1; k <= std::min(offer.k_max, PYFLY_MAX_DEPTH); k++) {
            reached *= hoped_for ? *hoped_for : acceptance(offer.drafter, offer.proposal_class, k);
            tokens += reached;
            const double more_rows = cost(k + 1) - cost(1);
            const double drafting = cost_of_drafting(offer.drafter, k);
            const double v = tokens / (cost(1) + share * (more_rows + drafting) +
                                       cost_of_catching_up(offer) / rounds_to_stay(tokens));
            if (v > choice.speed) {
                choice = {offer.drafter, k, v};
            }
        }
    }
    return choice;
}

bool Governor::can_pay(int32_t drafter, int32_t k_max) const {
    const Arm * a = arm(drafter);
    const bool is_measured = a && a->draft.n_measured() > 0;
    return best({{drafter, k_max, 0}}, is_measured ? optimistic : plausible).drafter >= 0;
}

// What a batch of several rows costs is not known yet. A model that was asked for a draft and gave none is judged by
// what such a batch may cost.
Governor::Choice Governor::first_attempt(const std::vector<Offer> & offers) {
    for (const Offer & offer : offers) {
        const Arm & a = arm(offer.drafter);
        const bool has_declined = !a.is_free && a.draft.n_measured() > 0 && best({offer}).drafter < 0;
        const bool is_worth_it = a.is_free ? acceptance(offer.drafter, offer.proposal_class, 1) > promising
                                           : can_pay(offer.drafter, offer.k_max) && !has_declined;
        if (is_worth_it) {
            return {offer.drafter, std::min(offer.k_max, first_k)};
        }
    }
    return {};
}

// Whether a model that does not seem to pay is tried once more: if a text may cost that, and the model could pay at
// all. Every token that passes makes it dearer, because the model has to catch up.
bool Governor::is_worth_a_retry(const Offer & offer, int32_t k) {
    const Arm & a = arm(offer.drafter);
    const double price =
        believed_share(offer.drafter) *
        (cost_of_catching_up(offer) + cost(k + 1) + cost_of_drafting(offer.drafter, k) - cost(1)); // if all is rejected
    const bool must_wait = a.draft.n_measured() >= CostCurve::n_confirmed && a.rounds_idle < a.patience;
    if (must_wait || retries_us_ + price > spent_on_retries * (n_text_ + rest()) * cost(1) ||
        best({offer}, worth_a_retry).drafter < 0) {
        return false;
    }
    retries_us_ += price;
    return true;
}

// Nothing seems to pay: what was measured may be wrong by now. A drafter is tried again, more and more rarely while
// that changes nothing: a free one if it would have been right (its acceptance is known without trying), another if it
// is worth the price.
Governor::Choice Governor::retry(const std::vector<Offer> & offers) {
    for (const Offer & offer : offers) {
        Arm & a = arm(offer.drafter);
        const Choice attempt = {offer.drafter, std::min(offer.k_max, first_k)};
        if (a.is_free ? a.rounds_idle < a.patience : !is_worth_a_retry(offer, attempt.k)) {
            continue;
        }
        a.patience = std::min(2 * a.patience, most_patience);
        a.rounds_idle = 0;
        is_retry_ = !a.is_free;
        if (is_retry_ || acceptance(offer.drafter, offer.proposal_class, 1) > promising) {
            return attempt;
        }
    }
    return {};
}

// Rounds between two measurements of C(1). A plain round yields one token in the time C(1) instead of 1 / v.
double Governor::rounds_between_plain(const Choice & choice) const {
    const double round = cost(choice.k + 1) + cost_of_drafting(choice.drafter, choice.k);
    const double lost = cost(1) - 1.0 / choice.speed;
    return std::clamp(lost / (spent_on_plain * round), least_rounds, most_rounds);
}

Governor::Choice Governor::choose(const std::vector<Offer> & offers) {
    Choice choice;
    rounds_since_plain_++;
    is_retry_ = false;
    // Plain decoding is what everything is compared with: it is measured first, and again now and then.
    if (!offers.empty() && target_.is_known(1)) {
        choice = target_.knows_more_than_one() ? best(offers) : first_attempt(offers);
        if (choice.drafter < 0) {
            choice = retry(offers);
        } else {
            arm(choice.drafter).patience = arm(choice.drafter).least_patience();
            if (static_cast<double>(rounds_since_plain_) >= rounds_between_plain(choice)) {
                choice = {};
            }
        }
    }
    for (const Offer & offer : offers) {
        Arm & a = arm(offer.drafter);
        a.rounds_idle = offer.drafter == choice.drafter ? 0 : a.rounds_idle + 1;
    }
    if (choice.drafter < 0) {
        rounds_since_plain_ = 0;
    }
    rounds_at_[static_cast<size_t>(choice.k)]++;
    return choice;
}

void Governor::fade(Acceptance & counts, double kept) {
    for (size_t i = 0; i < counts.seen.size(); i++) {
        counts.seen[i] *= kept;
        counts.accepted[i] *= kept;
    }
    counts.run_likelihood = 1.0;
}

void Governor::begin_text() {
    if (n_text_ > 0.0) {
        n_typical_ += length_rate * (n_text_ - n_typical_);
    }
    n_text_ = retries_us_ = 0.0;
    for (Arm & a : arms_) {
        a.patience = a.is_free ? a.patience : a.least_patience();
        for (Acceptance & counts : a.classes) {
            fade(counts, carry_over);
            for (size_t i = 0; !a.is_free && i < counts.seen.size(); i++) { // these counts decay, a prior does not
                counts.seen[i] += hope.weight;
                counts.accepted[i] += hope.weight * hope.acceptance;
            }
        }
    }
}

void Governor::observe_target(int32_t n_rows, double us) {
    target_.observe(n_rows, us);
}

void Governor::observe_draft(int32_t drafter, int32_t k, double us) {
    arm(drafter).draft.observe(k, us);
}

void Governor::observe_catch_up(int32_t drafter, int64_t n_tokens, double us) {
    if (n_tokens < 1) {
        return;
    }
    double & estimate = arm(drafter).us_per_caught_up;
    const double cost = us / static_cast<double>(n_tokens);
    estimate = estimate == 0.0 ? cost : estimate + catch_up_rate * (cost - estimate);
}

void Governor::observe_length(int64_t n_tokens) {
    n_text_ += static_cast<double>(n_tokens);
}

void Governor::observe_acceptance(int32_t drafter, int32_t proposal_class, int32_t n_drafted, int32_t n_accepted) {
    Acceptance & counts = arm(drafter).classes[static_cast<size_t>(std::clamp(proposal_class, 0, n_classes - 1))];
    if (n_drafted > 0) {
        const bool outcome = n_accepted > 0;
        const double expected = acceptance(drafter, proposal_class, 1);
        const double likelihood = outcome ? expected : 1.0 - expected;
        counts.run_likelihood = (outcome == counts.last_outcome ? counts.run_likelihood : 1.0) * likelihood;
        counts.last_outcome = outcome;
        if (counts.run_likelihood < unlikely) {
            fade(counts, forget);
        }
    }
    if (is_retry_ && !arm(drafter).is_free) {
        retries_us_ -= n_accepted * cost(1); // it was not all rejected
        if (n_accepted == n_drafted) {
            arm(drafter).patience = std::max(arm(drafter).patience / 4, arm(drafter).least_patience());
        }
    }
    const int32_t n_seen = std::min({n_drafted, n_accepted + 1, PYFLY_MAX_DEPTH});
    for (size_t i = 0; i < static_cast<size_t>(std::max(n_seen, 0)); i++) {
        counts.seen[i] = decay * counts.seen[i] + 1.0;
        counts.accepted[i] = decay * counts.accepted[i] + (static_cast<int32_t>(i) < n_accepted ? 1.0 : 0.0);
    }
}

} // namespace pyfly
