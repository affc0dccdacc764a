// How many tokens of prompts go into an iteration while other requests are in the middle of theirs: few enough that
// these are not held up, and as many as that allows, since small chunks cost more for each token.
//
// Nothing about prompts is measured beforehand: costs fall with the length of a chunk and rise with what is before it
// and with other load, so the last chunks tell best what the next one will take.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pyfly {

class PromptChunks {
  public:
    static constexpr int32_t n_least = 8; // in shorter chunks a prompt would take for ever

    // n_most >= 1: of a chunk, whatever it takes. us_most: by which a chunk may lengthen an iteration, though always by
    // as much as the iteration would take without it; 0: no limit.
    void configure(int32_t n_most, int64_t us_most);

    // Tokens of the next chunk, 1..n_most.
    int32_t n() const;

    // Batches with n_prompt tokens of prompts, or of a request that is evaluated again, took us > 0; with steps or
    // without.
    void observe(size_t n_prompt, bool has_steps, double us);

  private:
    double limit() const;

    int32_t n_most_ = 1;
    double us_most_ = 0.0;
    double us_of_steps_ = 0.0; // of iterations without prompts, recent ones count more; 0: none yet
    double us_of_token_ = 0.0; // of a prompt, likewise
};

} // namespace pyfly
