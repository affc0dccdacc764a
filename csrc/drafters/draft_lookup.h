// Guesses at what a draft model is about to draft, for it to check: FLy's multi-level decoding (arXiv 2511.22972, there
// with prompt lookup in the draft model as well). No llama.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "prompt_lookup.h"

namespace pyfly {

// Prompt lookup in a request and in what is drafted of it so far. The draft model evaluates the guesses in one batch
// with the last token of its draft and keeps them up to the first that is not its own choice, so its draft is the same
// and takes fewer batches.
//
// How many are guessed follows the request's last guesses: twice as many if all were right, else as many as were
// right, and at least one. So where text is copied, guesses soon are as long as the draft, and elsewhere a wrong one
// costs about one row.
class DraftLookup {
  public:
    DraftLookup();

    // At most n_max tokens to follow `text` (not empty), a request's history and what is drafted behind it; none where
    // its last two tokens did not occur before.
    std::vector<int32_t> guess(int32_t slot, const std::vector<int32_t> & text, size_t n_max);

    // What came of these guesses: the first n_right <= n_guessed, n_guessed >= 1, were what the model drafted.
    void learn(int32_t slot, size_t n_guessed, size_t n_right);

    // Another owner's request begins: neither tokens nor numbers of the slot's last one are kept.
    void forget(int32_t slot);

  private:
    size_t & length(int32_t slot);

    PromptLookup lookup_;
    std::vector<size_t> lengths_; // by slot: how many are guessed next
};

} // namespace pyfly
