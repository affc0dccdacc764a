#include "outcomes.h"

#include <algorithm>

namespace pyfly {

void Outcomes::follow(int32_t drafter, Proposal proposal, size_t position) {
    const bool is_followed =
        std::any_of(shadows_.begin(), shadows_.end(), [&](const Shadow & s) { return s.drafter == drafter; });
    if (!proposal.tokens.empty() && !is_followed) {
        shadows_.push_back({drafter, std::move(proposal), position});
    }
}

size_t Outcomes::learn(Policy & policy, int32_t slot, int32_t drafter, int32_t proposal_class,
                       const std::vector<int32_t> & tokens, int32_t n_asked, bool has_confidence, size_t n_before,
                       const std::vector<int32_t> & history, bool is_end) {
    size_t n_accepted = 0;
    if (drafter >= 0) {
        while (n_accepted < tokens.size() && n_before + n_accepted < history.size() &&
               history[n_before + n_accepted] == tokens[n_accepted]) {
            n_accepted++;
        }
    }
    if (drafter >= 0 && !has_confidence) {
        // What was drafted behind the end was not wrong. A draft that ended early is one that failed there: it was paid
        // for, and brought no more.
        const size_t n_drafted = std::max(tokens.size(), static_cast<size_t>(n_asked));
        policy.observe_acceptance(slot, drafter, proposal_class, static_cast<int32_t>(is_end ? n_accepted : n_drafted),
                                  static_cast<int32_t>(n_accepted));
    }
    for (size_t i = 0; i < shadows_.size();) {
        const Shadow & shadow = shadows_[i];
        const std::vector<int32_t> & proposed = shadow.proposal.tokens;
        const size_t n_known = history.size() > shadow.position ? history.size() - shadow.position : 0;
        size_t n_right = 0;
        while (n_right < std::min(proposed.size(), n_known) &&
               history[shadow.position + n_right] == proposed[n_right]) {
            n_right++;
        }
        if (n_right == n_known && n_right < proposed.size() && n_known > 0) {
            i++; // right so far
            continue;
        }
        policy.observe_acceptance(slot, shadow.drafter, shadow.proposal.proposal_class,
                                  static_cast<int32_t>(proposed.size()), static_cast<int32_t>(n_right));
        shadows_.erase(shadows_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    return n_accepted;
}

} // namespace pyfly
