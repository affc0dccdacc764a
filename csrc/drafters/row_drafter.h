// A drafter whose rows the caller gives: a model of the caller's own.
#pragma once

#include "drafter.h"
#include "pyfly.h"

namespace pyfly {

class RowDrafter : public Drafter {
  public:
    // Rows of n_vocab logits. Throws Error(PYFLY_STATUS_INVALID) without a callback, or without a vocabulary.
    RowDrafter(pyfly_row_callback row, void * user, int32_t n_vocab);

    int32_t n_slots() const override { return INT32_MAX; }  // it sees a whole history each time
    bool can_be_measured() const override { return false; } // nobody knows what else it does
    bool has_rows() const override { return true; }
    bool draws() const override { return true; }

    // Throws Error: CALLBACK when the callback stops, NOT_FINITE for a row without a distribution.
    void propose(const std::vector<DraftRequest> & requests) override;

  private:
    pyfly_row_callback row_;
    void * user_;
    size_t n_vocab_;
};

} // namespace pyfly
