// What MTP and EAGLE-3 heads have in common: small models that read the target's hidden states.
#pragma once

#include <memory>

#include "drafter.h"
#include "llama/draft_context.h"
#include "llama/llama_model.h"
#include "seen_text.h"
#include "text_memories.h"

namespace pyfly {

// A head predicts token i + 1 from token i and a row of the target's hidden states at i - 1. Such a pair is entry i of
// its KV cache. Rows are copied as the target evaluates; entries are evaluated no sooner than the next draft needs
// them, together with its first step, so that rejected drafts cost nothing; a long prompt goes batch by batch. While
// it drafts, a head feeds itself its own hidden states; those entries are removed again.
//
// A head that lacks the rows of some stretch (it was set in the middle of a text, or its cache had no room for all
// texts) starts behind it.
class HeadDrafter : public Drafter {
  public:
    int32_t n_texts() const override { return memories_.n(); }
    void observe(const std::vector<Span> & spans, const std::vector<bool> & wanted) override;
    void propose(const std::vector<DraftRequest> & requests) override;
    bool has_rows() const override { return true; }
    bool draws() const override { return true; }
    int64_t n_evaluated() const override { return n_evaluated_; }
    int64_t n_batches() const override { return memories_.n_batches(); }

  protected:
    struct Shape {
        const char * name;  // in errors
        size_t row_width;   // floats of a target row
        size_t input_width; // floats of what goes with a token into the head
        size_t first_entry; // index of the first entry of a text
        int32_t n_heads;    // heads of which each drafts one step; 1: one head drafts all
    };

    struct Parts {
        ModelPointer model; // null: the target's
        ContextPointer context;
        ThreadPool * threads; // whose size the context follows; null: it has its own thread count
        Shape shape;
    };

    HeadDrafter(Parts parts, double p_min);

    // Copies rows of a span of the target's last evaluate(): [n][row_width] from its token `begin` on.
    virtual void read_rows(size_t span, size_t begin, size_t n, float * out) = 0;

    // Turns rows [n][row_width] of any texts into inputs [n][input_width].
    virtual void make_inputs(const float * rows, size_t n, float * out) = 0;

    // Makes head `step` the one that is evaluated.
    virtual void select(int32_t step) { (void) step; }

    LlamaModel & own() { return own_; }
    const Shape & shape() const { return shape_; }

  private:
    struct Text {
        SeenText seen;
        size_t begin; // entry at position 0 of the text's memory; never before seen.begin()
    };

    // The entries of a text before `end` are to be evaluated, of tokens that begin at position `offset`.
    struct Goal {
        int32_t text;
        const std::vector<int32_t> & tokens;
        size_t offset, end;
    };

    // A text to draft for.
    struct Job {
        int32_t text;
        const std::vector<int32_t> & history;
        Proposal * out;
        size_t n_max;
        bool wants_rows;
        const DrawDraft & draw;
        size_t entry = 0;                 // the first of the next batch
        std::vector<int32_t> tokens = {}; // of the next batch
        std::vector<float> inputs = {};
        std::vector<int32_t> drafted = {};
        bool is_done = false;
    };

    // What goes with n tokens from `entry` on is wanted at `out`.
    struct Wanted {
        int32_t text;
        size_t entry, n;
        float * out;
    };

    bool is_chain() const { return shape_.n_heads > 1; }
    Text & at(int32_t text) { return texts_[static_cast<size_t>(text)]; }
    size_t next_entry(int32_t text) const { return texts_[static_cast<size_t>(text)].begin + memories_.at(text).n(); }
    void restart(int32_t text, size_t entry);
    void restart_at_rows(int32_t text);
    void cut_entries(int32_t text, const std::vector<int32_t> & tokens, size_t offset, size_t end);
    void trim_rows(int32_t text);
    bool sync(int32_t text, const std::vector<int32_t> & history);
    void make_room(const std::vector<int32_t> & texts, size_t n_new);
    void catch_up(const std::vector<Goal> & goals);
    void gather_inputs(const std::vector<Wanted> & wanted);
    void draft(std::vector<Job> & jobs);
    void keep_entries(const std::vector<Job> & jobs);

    ModelPointer model_; // outlives the context
    ContextPointer context_;
    Shape shape_;
    double p_min_;
    LlamaModel own_;
    TextMemories memories_; // of the entries' tokens
    std::vector<Text> texts_;
    std::vector<float> rows_, inputs_;
    int64_t n_evaluated_ = 0;
};

} // namespace pyfly
