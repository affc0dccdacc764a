// A model whose rows come from a callback, for tests. No llama.h.
#pragma once

#include <optional>

#include "model.h"
#include "pyfly.h"
#include "rewind.h"

namespace pyfly {

class ScriptedModel : public Model {
  public:
    // n_cells: positions that all sequences can hold together. Requires everything >= 1; throws
    // Error(PYFLY_STATUS_INVALID) otherwise.
    ScriptedModel(const pyfly_scripted_config & config, pyfly_row_callback row, void * user);

    int32_t n_vocab() const override { return config_.n_vocab; }
    int32_t n_ctx() const override { return config_.n_ctx; }
    int32_t n_batch() const override { return config_.n_batch; }
    int32_t n_sequences() const override { return config_.n_sequences; }
    int64_t n_cells() const override { return config_.n_cells; }
    void evaluate(const std::vector<Span> & spans) override;
    const float * row(size_t span, size_t i) override;
    int32_t truncate(int32_t sequence, int32_t n) override;
    int32_t rewind_depth() const override { return is_recurrent() ? config_.n_snapshots : unlimited; }
    bool checkpoint(int32_t sequence, bool is_kept) override;
    Checkpoints * checkpoints(int32_t sequence) override;
    bool can_checkpoint() const override { return config_.has_checkpoints != 0; }
    void settle(int32_t sequence) override;
    bool can_copy() const override { return !is_recurrent() || can_checkpoint(); }
    bool copy(int32_t from, int32_t to, int32_t n) override;

  private:
    struct Held {
        std::vector<int32_t> memory;
        std::optional<Rewind> rewind; // of a recurrent memory; a state is the first positions of `memory`
    };

    bool is_recurrent() const { return config_.n_snapshots >= 0; }
    Held & at(int32_t sequence) { return held_[static_cast<size_t>(sequence)]; }
    void act(Held & held);

    pyfly_scripted_config config_;
    pyfly_row_callback row_;
    void * user_;
    std::vector<Held> held_;
    std::vector<float> rows_;
    std::vector<size_t> first_; // of each span of the last evaluate(): index of its first row in rows_ ...
    std::vector<size_t> skip_;  // ... and its first_row
};

} // namespace pyfly
