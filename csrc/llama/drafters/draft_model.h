// A second, cheaper model of the same vocabulary, decoded greedily.
#pragma once

#include "drafters/drafter.h"
#include "drafters/slot_memories.h"
#include "llama/draft_context.h"
#include "llama/llama_model.h"

namespace pyfly {

// Keeps the draft's KV cache for what it drafted and trims it after verification: a verified batch is never evaluated
// again. Where the history outgrows the draft's context, the oldest half of it is dropped by shifting the cache, so the
// draft goes on from its most recent window at no cost per step. So does it for every request where all of them outgrow
// the cells that they share, once the requests that are not drafted for are forgotten.
class DraftModel : public Drafter {
  public:
    // Loads the model. Throws Error: NATIVE if llama.cpp cannot, INCOMPATIBLE if the vocabularies differ (unless
    // is_translated: what it is asked is in its own).
    DraftModel(const LlamaTarget & target, const pyfly_draft_model_config & config, bool is_translated = false);

    // Opens the file of a draft model that fits the target; throws Error as the constructor does. is_translated: it may
    // have another vocabulary.
    static ModelPointer open(const llama_model * target, const ModelFile & file, const OpenDraft & open,
                             bool is_translated = false);

    const llama_vocab * vocabulary() const { return llama_model_get_vocab(model_.get()); }

    int32_t n_slots() const override { return memories_.n(); }
    size_t prepare(int32_t slot, const std::vector<int32_t> & history, size_t n_most) override;
    size_t n_behind(int32_t slot, const std::vector<int32_t> & history) const override;
    void forget(int32_t slot) override { memories_.clear(slot); }
    void share(int32_t from, int32_t to, const std::vector<int32_t> & history) override {
        memories_.share(from, to, history.data(), history.size() - 1);
    }
    void propose(const std::vector<DraftRequest> & requests) override;
    bool has_rows() const override { return true; }
    bool draws() const override { return true; }
    int64_t n_evaluated() const override { return n_evaluated_; }
    double expected_cost() const override { return expected_cost_; } // decoding reads all weights: by their sizes

  private:
    // A request to catch up with, or to draft for.
    struct Job {
        int32_t slot;
        const std::vector<int32_t> & history;
        size_t n_more; // tokens that its memory is to hold behind the last one
        Proposal * out = nullptr;
        bool wants_rows = false;
        DrawDraft draw = {};
        DraftStop stop = {};
        bool is_done = false;
    };

    static ModelPointer load(const LlamaTarget & target, const pyfly_draft_model_config & config, bool is_translated,
                             size_t & n_positions);

    void warm_up();
    size_t n_new(const Job & job) const;
    void move_window(const Job & job, size_t n_ctx);
    size_t catch_up(const std::vector<Job> & jobs, size_t n_most = SIZE_MAX);
    void draft(std::vector<Job> & jobs);
    void take(Job & job, const float * row) const;

    double p_min_;
    size_t n_positions_ = 0; // most that it can be given; 0: any number
    double expected_cost_;
    ModelPointer model_;
    ContextPointer context_;
    LlamaModel own_;
    SlotMemories memories_;
    size_t n_vocab_;      // of the target
    size_t n_shared_;     // tokens that both have; the rest is padding, which is never drafted
    size_t n_ctx_;        // most that one request gets
    size_t n_ctx_of_all_; // that each gets where all are long
    int64_t n_evaluated_ = 0;
};

} // namespace pyfly
