// What MTP and EAGLE-3 heads have in common: they draft token by token.
#pragma once

#include "head.h"

namespace pyfly {

// A step head predicts token i + 1 from entry i, token and row. The entries that are pending are evaluated together
// with a draft's first step. While it drafts, the head feeds itself its own hidden states. Chained heads draft a token
// each, and no more.
class StepHead : public HeadDrafter {
  public:
    int32_t draft_most() const override { return is_chain() ? shape().n_heads : INT32_MAX; }

  protected:
    StepHead(Parts parts, double p_min);

    size_t n_cells(const std::vector<Job> & jobs) const override;
    void draft(std::vector<Job> & jobs) override;

  private:
    struct Step {
        Job * job;
        size_t entry;                // the first of the next batch
        std::vector<int32_t> tokens; // of the next batch
        std::vector<float> inputs;
        bool is_done = false;
    };

    bool is_chain() const { return shape().n_heads > 1; }
    void take_steps(std::vector<Step> & all);
};

} // namespace pyfly
