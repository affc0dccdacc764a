// The first drafter that proposes something, at full length: exactly reproducible. No llama.h.
#pragma once

#include "policy.h"

namespace pyfly {

class FixedPolicy : public Policy {
  public:
    std::vector<Choice> choose(const std::vector<Candidate> & candidates) override {
        std::vector<Choice> choices;
        for (const Candidate & candidate : candidates) {
            choices.push_back(candidate.offers.empty()
                                  ? Choice{}
                                  : Choice{candidate.offers.front().drafter, candidate.offers.front().k_max});
        }
        return choices;
    }
    bool asks_the_next() const override { return true; }
};

} // namespace pyfly
