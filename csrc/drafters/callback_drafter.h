// A drafter written by the caller.
#pragma once

#include "drafter.h"
#include "pyfly.h"

namespace pyfly {

class CallbackDrafter : public Drafter {
  public:
    // n_vocab: width of the rows that it gives, 0: none. Throws Error(PYFLY_STATUS_INVALID) without a callback.
    CallbackDrafter(pyfly_draft_callback draft, void * user, int32_t n_vocab);

    int32_t n_slots() const override { return INT32_MAX; } // it sees a whole history each time

    bool can_be_measured() const override { return false; } // nobody knows what else it does

    bool has_rows() const override { return n_vocab_ > 0; }

    // Throws Error(PYFLY_STATUS_CALLBACK) when the callback stops.
    void propose(const std::vector<DraftRequest> & requests) override;

  private:
    pyfly_draft_callback draft_;
    void * user_;
    size_t n_vocab_;
};

} // namespace pyfly
