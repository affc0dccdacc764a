#include "acceptance.h"

#include <algorithm>

namespace pyfly {

size_t Acceptance::index(int32_t proposal_class) {
    return static_cast<size_t>(std::clamp(proposal_class, 0, n_classes - 1));
}

void Acceptance::begin_request(int32_t slot) {
    if (static_cast<size_t>(slot) < requests_.size()) {
        requests_[static_cast<size_t>(slot)] = {};
    }
}

Acceptance::Seen & Acceptance::of(int32_t slot) {
    const size_t i = static_cast<size_t>(slot);
    if (i >= requests_.size()) {
        requests_.resize(i + 1);
    }
    return requests_[i];
}

const Acceptance::Seen * Acceptance::find(int32_t slot) const {
    return slot >= 0 && static_cast<size_t>(slot) < requests_.size() ? &requests_[static_cast<size_t>(slot)] : nullptr;
}

void Acceptance::Counts::count(int32_t i, double n_seen, double n_accepted, double memory) {
    const size_t depth = static_cast<size_t>(i);
    const double kept = 1.0 - (1.0 - memory) * n_seen;
    seen[depth] = kept * seen[depth] + n_seen;
    accepted[depth] = kept * accepted[depth] + n_accepted;
}

void Acceptance::count(Counts & own, Counts & all, int32_t i, double n_seen, double n_accepted) const {
    own.count(i, n_seen, n_accepted, rates_.memory);
    all.count(i, n_seen, n_accepted, rates_.memory_of_all);
}

void Acceptance::observe(int32_t slot, int32_t proposal_class, int32_t n_drafted, int32_t n_accepted) {
    if (n_drafted < 1) {
        return;
    }
    const int32_t n_seen = std::min({n_drafted, n_accepted + 1, PYFLY_MAX_DEPTH});
    for (int32_t i = 0; i < n_seen; i++) {
        count(of(slot).classes[index(proposal_class)], all_.classes[index(proposal_class)], i, 1.0,
              i < n_accepted ? 1.0 : 0.0);
    }
}

void Acceptance::expect(int32_t slot, int32_t n_asked, const std::vector<double> & reached) {
    double before = 1.0;
    for (int32_t i = 0; i < std::min(n_asked, PYFLY_MAX_DEPTH) && before > 0.0; i++) {
        const size_t depth = static_cast<size_t>(i);
        const double now = depth < reached.size() ? reached[depth] : 0.0;
        count(of(slot).classes[0], all_.classes[0], i, before, now);
        before = now;
    }
}

// Depths that were hardly seen take after the depth before them.
void Acceptance::reach(int32_t slot, int32_t proposal_class, int32_t k, double * reached) const {
    const Counts & all = all_.classes[index(proposal_class)];
    const Seen * seen = find(slot);
    const Counts * own = seen ? &seen->classes[index(proposal_class)] : nullptr;
    double of_all = rates_.first, of_request = 0.0, product = 1.0;
    for (int32_t i = 0; i < k; i++) {
        of_all = all.at(i, of_all, 1.0);
        const double inherit = i == 0 ? 0.0 : rates_.inherit;
        const double prior = (1.0 - inherit) * of_all + inherit * of_request;
        of_request = own ? own->at(i, prior, rates_.weight_of_all) : prior;
        product *= of_request;
        reached[i] = product;
    }
}

void Acceptance::observe_length(int32_t slot, int32_t n_asked, int32_t n_drafted, int32_t n_verified) {
    const int32_t n = std::min(n_asked, PYFLY_MAX_DEPTH);
    Seen & own = of(slot);
    for (int32_t i = 0; i < n; i++) {
        count(own.drafted, all_.drafted, i, 1.0, i < n_drafted ? 1.0 : 0.0);
        count(own.verified, all_.verified, i, 1.0, i < n_verified ? 1.0 : 0.0);
    }
}

// Drafts that were never seen to end earlier do not.
void Acceptance::lengths(int32_t slot, int32_t k, double * drafted, double * verified) const {
    const Seen * own = find(slot);
    double all_drafted = 1.0, all_verified = 1.0;
    for (int32_t i = 0; i < k; i++) {
        all_drafted = all_.drafted.at(i, all_drafted, 1.0);
        all_verified = all_.verified.at(i, all_verified, 1.0);
        drafted[i] = own ? own->drafted.at(i, all_drafted, rates_.weight_of_all) : all_drafted;
        verified[i] = own ? own->verified.at(i, all_verified, rates_.weight_of_all) : all_verified;
    }
}

bool Acceptance::was_seen() const {
    return std::any_of(all_.classes.begin(), all_.classes.end(),
                       [](const Counts & counts) { return counts.seen[0] > 0.0; });
}

void Acceptance::of_all(int32_t k, double * at_depth) const {
    const auto commonest = std::max_element(all_.classes.begin(), all_.classes.end(),
                                            [](const auto & x, const auto & y) { return x.seen[0] < y.seen[0]; });
    double estimate = rates_.first;
    for (int32_t i = 0; i < k; i++) {
        estimate = commonest->at(i, estimate, 1.0);
        at_depth[i] = estimate;
    }
}

} // namespace pyfly
