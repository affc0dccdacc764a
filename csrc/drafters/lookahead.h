// What a draft model is itself drafted for: FLy's multi-level acceleration (arXiv 2511.22972). No llama.h.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "drafter.h"
#include "policy/governor.h"
#include "policy/outcomes.h"

namespace pyfly {

// A free drafter proposes tokens that the draft model evaluates together with the next one of its draft; those that are
// its own choices, up to the first that is not, are drafted at once. A governor decides how many of them are worth a
// row of its batch: by what its batches cost, and by how often proposals of the text were right of late. What is not
// tried is followed all the same, so that it knows.
class Lookahead {
  public:
    explicit Lookahead(std::unique_ptr<Drafter> drafter); // is_free()

    // A text whose draft goes on.
    struct Text {
        int32_t text;
        const std::vector<int32_t> * so_far; // the history and what is drafted behind it
        int32_t n_most;                      // tokens that may be tried, >= 0
    };

    // A draft of this text begins.
    void begin(int32_t text);

    // The tokens to be tried behind each of these texts in one batch.
    std::vector<std::vector<int32_t>> propose(const std::vector<Text> & texts);

    // The draft model has evaluated a batch: n_rows tokens in so many microseconds > 0. With care, or as it drafted.
    void expect_rows(int32_t n_rows, double us);
    void observe_rows(int32_t n_rows, double us) { governor_.observe_target(n_rows, us); }

    // What came of tokens that were tried (or none) behind the first n_before tokens of so_far. is_over: it drafts no
    // more, whatever was proposed.
    void learn(int32_t text, const std::vector<int32_t> & tried, size_t n_before, const std::vector<int32_t> & so_far,
               bool is_over);

  private:
    struct State {
        Outcomes outcomes;
        int32_t proposal_class = 0; // of what is tried
    };

    State & at(int32_t text);

    std::unique_ptr<Drafter> drafter_;
    Governor governor_;
    std::vector<State> texts_;
};

// With prompt lookup; null for null. Throws Error(PYFLY_STATUS_INVALID) as PromptLookup does.
std::unique_ptr<Lookahead> make_lookahead(const pyfly_lookup_config * lookup);

} // namespace pyfly
