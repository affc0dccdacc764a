// A second, cheaper model of the same vocabulary, decoded greedily.
#pragma once

#include "draft_context.h"
#include "drafter.h"

namespace pyfly {

// Keeps the draft's KV cache for what it drafted and trims it after verification: a verified batch is never evaluated
// again. Where the history outgrows the draft's context, the oldest half of it is dropped by shifting the cache, so the
// draft goes on from its most recent window at no cost per round.
class DraftModel : public Drafter {
  public:
    // Loads the model. Throws Error: NATIVE if llama.cpp cannot, INCOMPATIBLE if the vocabularies differ.
    DraftModel(const LlamaTarget & target, const pyfly_draft_model_config & config);

    size_t prepare(const std::vector<int32_t> & history) override;
    size_t n_behind(const std::vector<int32_t> & history) const override;
    void draft(const std::vector<int32_t> & history, int32_t n_max, std::vector<int32_t> & out) override;
    int64_t n_evaluated() const override { return n_evaluated_; }
    double expected_cost() const override { return expected_cost_; } // decoding reads all weights: by their sizes

  private:
    void warm_up();
    size_t n_common(const std::vector<int32_t> & history) const;
    void sync(const std::vector<int32_t> & history);
    void forget_from(size_t n);
    void forget_all();
    void make_room(size_t n_history, size_t n_new);
    size_t catch_up(const std::vector<int32_t> & history, size_t n_more);
    void evaluate(const int32_t * tokens, size_t n, bool with_row);

    double p_min_;
    ThreadPool * threads_; // whose size the context follows; null: it has its own thread count
    double expected_cost_;
    ModelPointer model_;
    ContextPointer context_;
    int32_t n_vocab_;
    size_t n_ctx_, n_batch_;
    bool can_shift_, can_rewind_;
    std::vector<int32_t> cached_; // tokens in the draft's memory, at positions 0, 1, ...
    size_t offset_ = 0;           // where cached_ begins in the history
    int64_t n_evaluated_ = 0;
};

} // namespace pyfly
