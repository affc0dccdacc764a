// DFlash (arXiv 2602.06036) and DSpark: heads that draft a whole block of tokens in one pass.
#pragma once

#include "head.h"
#include "llama/layer_rows.h"

namespace pyfly {

// The cache holds keys and values of the target's fused hidden states. To draft, a block of rows is put behind them:
// the last token of the history, the anchor, then mask tokens; each row proposes one token. It is as long as the draft
// that is wanted, and all requests get blocks of one length, as llama.cpp's graphs require. Token embedding and output
// matrix are the target's where the file has none.
//
// DFlash: the anchor's row proposes nothing, the rows see each other (unless the file says that attention is causal).
// Its second version chooses a chain among a few candidates of every row, by scores that its selector gave each pair.
// DSpark: in most files the anchor's row proposes, too; a Markov head adds to each row what usually follows the token
// before, and a confidence head says how likely a row is to be right.
class DFlash : public HeadDrafter {
  public:
    // is_dspark: which of the two is expected. draft_max: most tokens that are asked for, or 0: as many as a block has.
    // config.p_min is compared with a token's probability, of DSpark with the confidence. Throws Error: INCOMPATIBLE if
    // the file is no such head or one of another model, INVALID if draft_max is more than a block has or p_min needs a
    // confidence head that is not there, NATIVE if llama.cpp cannot.
    DFlash(LlamaTarget & target, const pyfly_draft_model_config & config, bool is_dspark, int32_t draft_max);

    // What the file says of a block.
    struct Block {
        int32_t n_most;       // tokens that it proposes at most
        size_t first_row;     // that proposes one
        int32_t mask_token;   // what the rows behind the anchor hold
        bool is_causal;       // rows see only those before them
        bool has_confidence;  // a confidence head
        int32_t n_candidates; // of a row, for the selector; 0: it has none
    };
    struct Opened {
        ModelPointer model;
        Block block;
    };

    // Opens the file of a head that fits the target; arguments and Errors as of the constructor.
    static Opened open(const llama_model * target, const ModelFile & file, bool is_dspark, int32_t draft_max,
                       double p_min, const OpenDraft & open);

    // Which of the two a file holds.
    static bool is_dspark(const ModelFile & file) { return file.has_tensor("markov_w1.weight"); }

    int32_t draft_most() const override { return block_.n_most; }
    bool drafts_at_once() const override { return true; }
    bool has_rows() const override { return block_.n_candidates == 0; }

  protected:
    void read_rows(size_t span, size_t begin, size_t n, float * out) override { rows_.read(span, begin, n, out); }
    void make_inputs(const float * rows, size_t n, float * out) override;
    size_t n_cells(const std::vector<Job> & jobs) const override;
    void draft(std::vector<Job> & jobs) override;

  private:
    struct Loaded {
        Parts parts;
        Block block;
    };

    DFlash(LlamaTarget & target, const pyfly_draft_model_config & config, Loaded loaded);
    static Loaded load(const LlamaTarget & target, const pyfly_draft_model_config & config, bool is_dspark,
                       int32_t draft_max);
    static Block read_block(const ModelFile & file, bool is_dspark, const std::string & what);

    size_t n_rows(const std::vector<Job> & jobs) const;
    void read_block_rows(size_t span, Job & job);
    void read_chain(size_t span, Job & job);
    const float * own_row(size_t span, size_t i);

    Block block_;
    LayerRows rows_;
};

} // namespace pyfly
