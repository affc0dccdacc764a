// What can be taken back of a memory that holds a recurrent state. No llama.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "checkpoints.h"

namespace pyfly {

// A recurrent state cannot be cut like a KV cache: it is known only where it was kept. Two kinds of states are:
//   snapshots   of the last tokens of the last batch (llama.cpp's n_rs_seq). Going back to one is free, but llama.cpp
//               does it once for each batch, never beyond the batch's first token, and answers with a wrong state
//               instead of an error where the batch was too short to fill them all.
//   checkpoints copies of the state at some positions, made on request. Restoring one loses what came after.
// This class decides; the target acts. Nothing is done before the next batch needs it, so that several truncations in
// a row become one and the single snapshot is enough for them.
class Rewind {
  public:
    // How to get to `n` positions.
    enum class Way { stay, snapshot, checkpoint, clear };
    struct Plan {
        Way way;
        int32_t n;
        Checkpoints::State state = nullptr; // of a checkpoint; others may have dropped that since
    };

    explicit Rewind(int32_t n_snapshots) : n_snapshots_(n_snapshots) {}

    // Plans to keep at most n of the n_held positions that the memory has, and returns how many will be kept: the most
    // that can be, at or below what was planned before. 0 is always possible.
    int32_t truncate(int32_t n_held, int32_t n);

    // What is planned. It must be carried out now; planning starts anew.
    Plan take();

    // Of n_held positions, those that will be left once the plan is carried out.
    int32_t n_left(int32_t n_held) const { return planned_.way == Way::stay ? n_held : planned_.n; }

    // A batch of n tokens was evaluated.
    void evaluated(size_t n) { n_last_ = static_cast<int32_t>(n); }

    // Somebody else used the memory, or a batch failed: nothing is known of its last batch.
    void forget_batch() { n_last_ = 0; }

    // Those behind what truncate() plans to keep are gone.
    Checkpoints & checkpoints() { return checkpoints_; }
    const Checkpoints & checkpoints() const { return checkpoints_; }

  private:
    int32_t n_snapshots_;
    int32_t n_last_ = 0; // tokens of the last batch, if no snapshot of it was used
    Checkpoints checkpoints_;
    Plan planned_ = {Way::stay, 0};
};

} // namespace pyfly
