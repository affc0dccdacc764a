// EAGLE-3 (Li et al. 2025): a head that reads the target's hidden states at three depths.
#pragma once

#include "llama/layer_rows.h"
#include "step_head.h"

namespace pyfly {

// The encoder fuses the inputs of the three target layers that the head names into one vector for each token; the
// decoder, one layer, continues from there on its own. A reduced draft vocabulary (d2t) comes back at full width, -inf
// outside. Token embedding and output matrix are the target's where the file has none.
class Eagle3 : public StepHead {
  public:
    // Throws Error: INCOMPATIBLE if the file is no such head or one of another model, NATIVE if llama.cpp cannot.
    Eagle3(LlamaTarget & target, const pyfly_draft_model_config & config);

    // Opens the file of a head that fits the target; throws Error as the constructor does.
    static ModelPointer open(const llama_model * target, const ModelFile & file, const OpenDraft & open);

  protected:
    void read_rows(size_t span, size_t begin, size_t n, float * out) override { rows_.read(span, begin, n, out); }
    void make_inputs(const float * rows, size_t n, float * out) override;

  private:
    static Parts load(const LlamaTarget & target, const pyfly_draft_model_config & config);

    LayerRows rows_;
};

} // namespace pyfly
