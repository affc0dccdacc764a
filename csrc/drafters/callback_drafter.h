// A drafter written by the caller.
#pragma once

#include "drafter.h"
#include "pyfly.h"

namespace pyfly {

class CallbackDrafter : public Drafter {
  public:
    // Throws Error(PYFLY_STATUS_INVALID) without a callback.
    CallbackDrafter(pyfly_draft_callback draft, void * user);

    // Throws Error(PYFLY_STATUS_CALLBACK) when the callback stops.
    void draft(const std::vector<int32_t> & history, int32_t n_max, std::vector<int32_t> & out) override;

  private:
    pyfly_draft_callback draft_;
    void * user_;
};

} // namespace pyfly
