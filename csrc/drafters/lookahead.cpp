#include "lookahead.h"

#include "prompt_lookup.h"

namespace pyfly {

namespace {

// Proposals that are followed without being tried tell as much as those that are, so nothing has to be hoped for.
GovernorSettings careful() {
    GovernorSettings settings;
    settings.hysteresis = 1.1;
    settings.acceptance.first = 0.4;
    return settings;
}

} // namespace

Lookahead::Lookahead(std::unique_ptr<Drafter> drafter) : drafter_(std::move(drafter)), governor_(careful()) {
    governor_.expect(0, true, 0.0);
}

Lookahead::State & Lookahead::at(int32_t text) {
    if (static_cast<size_t>(text) >= texts_.size()) {
        texts_.resize(static_cast<size_t>(text) + 1);
    }
    return texts_[static_cast<size_t>(text)];
}

void Lookahead::begin(int32_t text) {
    at(text).outcomes.begin();
}

void Lookahead::expect_rows(int32_t n_rows, double us) {
    MeasuredCosts costs;
    costs.target.push_back({n_rows, us});
    governor_.expect_costs(costs);
}

std::vector<std::vector<int32_t>> Lookahead::propose(const std::vector<Text> & texts) {
    std::vector<Proposal> proposals(texts.size());
    std::vector<DraftRequest> requests;
    for (size_t i = 0; i < texts.size(); i++) {
        if (texts[i].n_most > 0) {
            requests.push_back({texts[i].text, texts[i].so_far, texts[i].n_most, &proposals[i]});
        }
    }
    drafter_->propose(requests);
    std::vector<Candidate> candidates;
    for (size_t i = 0; i < texts.size(); i++) {
        candidates.push_back({texts[i].text, {}});
        if (!proposals[i].tokens.empty()) {
            const int32_t n = static_cast<int32_t>(proposals[i].tokens.size());
            candidates.back().offers.push_back({0, n, proposals[i].proposal_class});
        }
    }
    const std::vector<Choice> choices = governor_.choose(candidates);
    std::vector<std::vector<int32_t>> tried(texts.size());
    for (size_t i = 0; i < texts.size(); i++) {
        State & state = at(texts[i].text);
        if (choices[i].k > 0) {
            state.proposal_class = proposals[i].proposal_class;
            tried[i] = std::move(proposals[i].tokens);
            tried[i].resize(static_cast<size_t>(choices[i].k));
        } else {
            state.outcomes.follow(0, std::move(proposals[i]), texts[i].so_far->size());
        }
    }
    return tried;
}

void Lookahead::learn(int32_t text, const std::vector<int32_t> & tried, size_t n_before,
                      const std::vector<int32_t> & so_far, bool is_over) {
    State & state = at(text);
    state.outcomes.learn(governor_, text, tried.empty() ? -1 : 0, state.proposal_class, tried, 0, n_before, so_far,
                         is_over);
}

std::unique_ptr<Lookahead> make_lookahead(const pyfly_lookup_config * lookup) {
    if (lookup == nullptr) {
        return nullptr;
    }
    return std::make_unique<Lookahead>(std::make_unique<PromptLookup>(PromptLookup::Config{
        lookup->max_ngram, lookup->min_ngram, lookup->num_pred, static_cast<pyfly_lookup_match>(lookup->match)}));
}

} // namespace pyfly
