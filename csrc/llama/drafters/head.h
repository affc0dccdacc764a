// What all heads have in common: small models that read the target's hidden states, and keep a KV cache of them.
#pragma once

#include <functional>
#include <vector>

#include "drafters/drafter.h"
#include "drafters/seen_tokens.h"
#include "drafters/slot_memories.h"
#include "llama/draft_context.h"
#include "llama/llama_model.h"

namespace pyfly {

// Entry i of a head's KV cache is of token i and of a row of the target's hidden states: the one at i (lag 0), or the
// one at i - 1 (lag 1). Rows are copied as the target evaluates; entries are evaluated no sooner than the next draft
// needs them, so that rejected drafts cost nothing; a long prompt goes batch by batch. What a draft itself leaves in
// the cache is removed again.
//
// Rows and entries are of stretches (stretch.h). A head that lacks the rows of what comes before (it was set in the
// middle of a request, or its cache had no room for all requests) begins behind that.
class HeadDrafter : public Drafter {
  public:
    int32_t n_slots() const override { return memories_.n(); }
    void observe(Model & target, const std::vector<Span> & spans, const std::vector<bool> & wanted) override;
    void propose(const std::vector<DraftRequest> & requests) override;
    bool has_rows() const override { return true; }
    bool reads_target() const override { return true; }
    size_t n_reusable(int32_t slot, const std::vector<int32_t> & history, size_t n) const override;
    void forget(int32_t slot) override;
    bool draws() const override { return has_rows(); }
    int64_t n_evaluated() const override { return n_evaluated_; }

  protected:
    struct Shape {
        const char * name;  // in errors
        size_t row_width;   // floats of a target row
        size_t input_width; // floats of what goes with a token into the head, or in its place
        size_t lag;         // 0 or 1
        size_t first_entry; // index of the first entry of a request
        int32_t n_heads;    // heads of which each drafts one step; 1: one head drafts all
    };

    struct Parts {
        ModelPointer model; // null: the target's
        ContextPointer context;
        ThreadPool * threads; // whose size the context follows; null: it has its own thread count
        Shape shape;
    };

    // A request to draft for.
    struct Job {
        int32_t slot;
        const std::vector<int32_t> & history; // of which the last token was not evaluated
        Proposal * out;
        size_t n_max; // tokens to propose, >= 1
        bool wants_rows;
        const DrawDraft & draw;
        const DraftStop & stop;
        std::vector<int32_t> drafted = {};
        size_t last() const { return history.size() - 1; }
    };

    // The entries of a request before `end` are to be evaluated, of tokens that begin at position `offset`.
    struct Goal {
        int32_t slot;
        const std::vector<int32_t> & tokens;
        size_t offset, end;
    };

    // What goes with n tokens from `entry` on is wanted at `out`.
    struct Wanted {
        int32_t slot;
        size_t entry, n;
        float * out;
    };

    HeadDrafter(Parts parts, double p_min);

    // Copies rows of a span of the target's last evaluate(): [n][row_width] from its token `begin` on.
    virtual void read_rows(size_t span, size_t begin, size_t n, float * out) = 0;

    // Turns rows [n][row_width] of any requests into inputs [n][input_width].
    virtual void make_inputs(const float * rows, size_t n, float * out) = 0;

    // Makes head `step` the one that is evaluated.
    virtual void select(int32_t step) { (void) step; }

    // Cells that these drafts take behind the entries before the last token of each request.
    virtual size_t n_cells(const std::vector<Job> & jobs) const = 0;

    // Fills in what was drafted. Of each request all entries but those that wait for a row are in the cache or can be
    // evaluated, and they, none behind them, are there afterwards, also after an Error.
    virtual void draft(std::vector<Job> & jobs) = 0;

    // Evaluates the entries that are wanted, under every head.
    void catch_up(const std::vector<Goal> & goals);

    // Collects what goes with tokens.
    void gather_inputs(const std::vector<Wanted> & wanted);

    // The first entry of a request that is not in the cache; keep_entries: drops those from `end` on.
    size_t next_entry(int32_t slot) const { return memories_.end(slot); }
    void keep_entries(int32_t slot, size_t end) { memories_.cut(slot, end); }

    // Evaluates parts behind the entries, see SlotMemories, and counts their tokens.
    void evaluate(const std::vector<SlotMemories::Part> & parts,
                  const std::function<void(size_t part, size_t span)> & read);

    LlamaModel & own() { return own_; }
    const Shape & shape() const { return shape_; }
    double p_min() const { return p_min_; }

  private:
    SeenTokens & seen(int32_t slot) { return seen_[static_cast<size_t>(slot)]; }
    const SeenTokens & seen(int32_t slot) const { return seen_[static_cast<size_t>(slot)]; }
    bool has_rows_for(int32_t slot, size_t end) const;
    void restart_at_rows(int32_t slot);
    void trim_rows(int32_t slot);
    bool sync(int32_t slot, const std::vector<int32_t> & history);
    void make_room(const std::vector<int32_t> & slots, size_t n_new);

    ModelPointer model_; // outlives the context
    ContextPointer context_;
    Shape shape_;
    double p_min_;
    LlamaModel own_;
    SlotMemories memories_;        // of the entries' tokens
    std::vector<SeenTokens> seen_; // by request
    std::vector<float> rows_, inputs_;
    int64_t n_evaluated_ = 0;
};

} // namespace pyfly
