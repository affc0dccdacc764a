// Prompt lookup: what followed the last n tokens when they occurred before is proposed again, from this request, from
// the answers of requests that have ended, and from texts that the user named. Saxena 2023, "Prompt Lookup Decoding";
// the "earliest" rule is that of the FLy reference code.
#pragma once

#include <map>

#include "drafter.h"
#include "ngram_index.h"
#include "pyfly.h"
#include "vocabulary.h"

namespace pyfly {

// The memory belongs to the drafter, so to one target and one vocabulary, and as everything of a drafter to one thread
// at a time. The same requests in the same order give the same proposals.
//
//   a request has ended           its answer and the last tokens before it are remembered, as far as the caller was
//                                 given them: nothing that was rolled back, or only drafted. Control tokens
//                                 (Vocabulary) are left out, and nothing is proposed across one. Each owner has a
//                                 memory, in which requests of others do not look. When n_memory tokens do not hold all
//                                 of them, the older half of the largest goes.
//   a request must not depend on  it looks in itself and in the named texts alone
//   earlier answers (DraftRequest)
//   several have an occurrence    the longest counts; among equals the request's own, then that of an answer
class PromptLookup : public Drafter {
  public:
    using Config = pyfly_lookup_config;

    // `vocabulary` is borrowed; null: there are no control tokens. `texts`: those that the user named, `answers`: what
    // the memory begins with, each with a NgramIndex::separator between two texts. Throws Error(PYFLY_STATUS_INVALID)
    // for a Config out of range, or for a token that the vocabulary does not have.
    PromptLookup(const Config & config, const Vocabulary * vocabulary, const std::vector<int32_t> & texts,
                 const std::vector<int32_t> & answers);

    int32_t n_slots() const override { return INT32_MAX; }

    // Classes go by where an occurrence is, in the request (0..3) or elsewhere (4..7), and by its length: the longer,
    // the surer.
    void propose(const std::vector<DraftRequest> & requests) override;
    void ended(const std::vector<int32_t> & history, size_t n_prompt, int32_t owner) override;
    bool is_free() const override { return true; }

    // The answers of owner 0 that are remembered, the oldest first, each with a separator behind it.
    const std::vector<int32_t> & answers() const { return answers_.at(0).tokens(); }

  private:
    void propose(const DraftRequest & request);
    NgramIndex & follow(int32_t slot, const std::vector<int32_t> & history);
    void remember(const int32_t * tokens, size_t n, int32_t owner);
    NgramIndex & answers_of(int32_t owner);

    Config config_;
    const Vocabulary * vocabulary_;
    std::vector<NgramIndex> histories_;     // by slot, as far as they were shown
    std::map<int32_t, NgramIndex> answers_; // by owner
    NgramIndex named_;
};

} // namespace pyfly
