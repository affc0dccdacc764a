// What MTP and EAGLE-3 heads have in common: small models that read the target's hidden states.
#pragma once

#include "draft_context.h"
#include "drafter.h"

namespace pyfly {

// A head predicts token i + 1 from token i and a row of the target's hidden states at i - 1. Such a pair is entry i of
// its KV cache. Rows are copied as the target evaluates; entries are evaluated no sooner than the next draft needs
// them, together with its first step, so that rejected drafts cost nothing; a long prompt goes batch by batch. While
// it drafts, a head feeds itself its own hidden states; those entries are removed again.
//
// A head that lacks the rows of some stretch (it was set in the middle of a sequence) starts behind it.
class HeadDrafter : public Drafter {
  public:
    void observe(const int32_t * tokens, size_t n, int32_t n_past) override;
    void draft(const std::vector<int32_t> & history, int32_t n_max, std::vector<int32_t> & out) override;
    int64_t n_evaluated() const override { return n_evaluated_; }

  protected:
    struct Shape {
        const char * name;  // in errors
        size_t row_width;   // floats of a target row
        size_t input_width; // floats of what goes with a token into the head
        size_t first_entry; // index of the entry at position 0 of the head's cache
        int32_t n_heads;    // heads of which each drafts one step; 1: one head drafts all
    };

    struct Parts {
        ModelPointer model; // null: the target's
        ContextPointer context;
        ThreadPool * threads; // whose size the context follows; null: it has its own thread count
        Shape shape;
    };

    HeadDrafter(Parts parts, double p_min);

    // Copies rows of the target's last batch: [n][row_width] from its token `begin` on.
    virtual void read_rows(size_t begin, size_t n, float * out) = 0;

    // Turns rows [n][row_width] into inputs [n][input_width].
    virtual void make_inputs(const float * rows, size_t n, float * out) = 0;

    // Makes head `step` the one that is evaluated.
    virtual void select(int32_t step) { (void) step; }

    llama_context * context() const { return context_.get(); }
    ThreadPool * threads() const { return threads_; }
    const Shape & shape() const { return shape_; }
    size_t n_ubatch() const { return n_ubatch_; }

  private:
    size_t seen_end() const { return seen_begin_ + seen_.size(); }
    size_t next_entry() const { return entries_begin_ + entries_.size(); }
    void restart(size_t entry);
    void cut_seen(size_t n);
    void cut_entries(size_t n);
    void remove_from(size_t entry);
    bool has_row_before(size_t entry) const;
    void trim_rows();
    bool sync(const std::vector<int32_t> & history);
    void catch_up(const std::vector<int32_t> & tokens, size_t offset, size_t end);
    void gather_inputs(size_t entry, size_t n);
    void evaluate(const int32_t * tokens, size_t n, size_t entry, bool with_rows);

    ModelPointer model_; // outlives the context
    ContextPointer context_;
    ThreadPool * threads_;
    Shape shape_;
    double p_min_;
    size_t n_batch_, n_ubatch_;
    int32_t n_vocab_;

    size_t seen_begin_ = 0; // position of the first token that the target was seen to evaluate without a gap since
    std::vector<int32_t> seen_;
    size_t rows_begin_ = 0; // rows_ are those of positions rows_begin_ .. seen_end()
    std::vector<float> rows_;
    size_t entries_begin_; // entries in the head's cache, by the position of their token; never before seen_begin_
    std::vector<int32_t> entries_;
    std::vector<float> inputs_;
    int64_t n_evaluated_ = 0;
};

} // namespace pyfly
