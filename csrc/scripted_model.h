// A target whose rows come from a callback: a model for tests. No llama.h.
#pragma once

#include <optional>

#include "pyfly.h"
#include "rollback.h"
#include "target.h"

namespace pyfly {

class ScriptedTarget : public Target {
  public:
    // Requires n_vocab, n_ctx and n_batch >= 1; throws Error(PYFLY_STATUS_INVALID) otherwise.
    ScriptedTarget(int32_t n_vocab, int32_t n_ctx, int32_t n_batch, pyfly_row_callback row, void * user);

    // Behaves as a recurrent memory from now on: n_snapshots states behind the last token (>= 0), and checkpoints or
    // none.
    void limit(int32_t n_snapshots, bool has_checkpoints);

    int32_t n_vocab() const override { return n_vocab_; }
    int32_t n_ctx() const override { return n_ctx_; }
    int32_t n_batch() const override { return n_batch_; }
    void evaluate(const int32_t * tokens, size_t n, int32_t n_past, size_t first_row) override;
    const float * row(size_t i) override;
    int32_t truncate(int32_t n) override;
    int32_t rewind_depth() const override { return rollback_ ? rollback_->n_snapshots() : unlimited; }
    bool checkpoint() override;
    void forget_checkpoint() override;
    bool can_checkpoint() const override { return has_checkpoints_; }
    void settle() override;

  private:
    void act();

    int32_t n_vocab_, n_ctx_, n_batch_;
    pyfly_row_callback row_;
    void * user_;
    std::vector<int32_t> memory_;
    std::optional<Rollback> rollback_;
    bool has_checkpoints_ = true;
    std::vector<int32_t> checkpoint_; // the memory at the checkpoint
    std::vector<float> rows_;
    size_t first_row_ = 0;
};

} // namespace pyfly
