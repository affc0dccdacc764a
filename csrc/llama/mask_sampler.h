// A sampler that forbids what a grammar outside of llama.cpp does not allow next.
#pragma once

#include "llama.h"
#include "pyfly.h"

namespace pyfly {

// Adds one to a chain of a vocabulary of n_vocab tokens, where llama.cpp's own grammar would be: before the first
// sampler that truncates, scales or selects. `user` must outlive the chain and its copies.
void add_mask(llama_sampler * chain, int32_t n_vocab, pyfly_mask_callback mask, void * user);

} // namespace pyfly
