// What a head is trained with: hidden states of a target, and what it would say.
#pragma once

#include <cstdint>
#include <vector>

#include "llama_target.h"

namespace pyfly {

// Where the rows go: [n][layers][n_embd] and [n][n_embd] as half floats, and [n][k].
struct LayerStates {
    uint16_t * states;
    uint16_t * final;
    int32_t * ids;
    float * log_probs;
};

// As pyfly_target_states() in pyfly.h. Throws Error.
void read_states(LlamaTarget & target, const std::vector<int32_t> & layers, const std::vector<int32_t> & tokens,
                 int32_t k, const LayerStates & out);

} // namespace pyfly
