// Tells the policy what became of a request's drafts. No llama.h.
#pragma once

#include <cstdint>
#include <vector>

#include "drafters/drafter.h"
#include "policy.h"

namespace pyfly {

// Also follows free proposals that were not verified: what comes next shows whether they would have been right.
class Outcomes {
  public:
    void begin() { shadows_.clear(); }

    // A proposal of a free drafter, to follow the request's first `position` tokens, is not verified.
    void follow(int32_t drafter, Proposal proposal, size_t position);

    // A step that had drafted `tokens` with `drafter` (-1: none) behind the first n_before tokens of the request is
    // over. n_asked: how many tokens were asked of a drafter that is not free; has_confidence: the caller tells the
    // policy of this draft; is_end: the request has ended. Returns how many of `tokens` were right.
    size_t learn(Policy & policy, int32_t slot, int32_t drafter, int32_t proposal_class,
                 const std::vector<int32_t> & tokens, int32_t n_asked, bool has_confidence, size_t n_before,
                 const std::vector<int32_t> & history, bool is_end);

  private:
    struct Shadow {
        int32_t drafter;
        Proposal proposal;
        size_t position; // of its first token
    };
    std::vector<Shadow> shadows_; // at most one of each drafter
};

} // namespace pyfly
