// A target whose rows come from a callback: a model for tests. No llama.h.
#pragma once

#include "pyfly.h"
#include "target.h"

namespace pyfly {

class ScriptedTarget : public Target {
  public:
    // Requires n_vocab, n_ctx and n_batch >= 1; throws Error(PYFLY_STATUS_INVALID) otherwise.
    ScriptedTarget(int32_t n_vocab, int32_t n_ctx, int32_t n_batch, pyfly_row_callback row, void * user);

    int32_t n_vocab() const override { return n_vocab_; }
    int32_t n_ctx() const override { return n_ctx_; }
    int32_t n_batch() const override { return n_batch_; }
    void evaluate(const int32_t * tokens, size_t n, int32_t n_past, size_t first_row) override;
    const float * row(size_t i) override;
    void truncate(int32_t n) override;
    bool can_rewind() const override { return true; }

  private:
    int32_t n_vocab_, n_ctx_, n_batch_;
    pyfly_row_callback row_;
    void * user_;
    std::vector<int32_t> memory_;
    std::vector<float> rows_;
    size_t first_row_ = 0;
};

} // namespace pyfly
