// Multi-token prediction: NextN blocks that were trained with the target and read its last hidden states.
#pragma once

#include "step_head.h"

namespace pyfly {

// The blocks of the target's own file, on the very weights that are loaded (config.model_path null), or those of a
// companion file. One block feeds itself for as long as is wanted; several chained ones draft one token each.
class Mtp : public StepHead {
  public:
    // `is_loaded`: the target was loaded with its MTP blocks; without, llama.cpp would abort the process. Throws Error:
    // INCOMPATIBLE if the target has no head or the head is of another model, INVALID if draft_max is more than chained
    // blocks can draft, NATIVE if llama.cpp cannot.
    Mtp(LlamaTarget & target, const pyfly_draft_model_config & config, int32_t draft_max, bool is_loaded);
    ~Mtp() override;

    // Opens the file of a head that fits the target; throws Error as the constructor does.
    static ModelPointer open(const llama_model * target, const ModelFile & file, int32_t draft_max,
                             const OpenDraft & open);

  protected:
    void read_rows(size_t span, size_t begin, size_t n, float * out) override;
    void make_inputs(const float * rows, size_t n, float * out) override;
    void select(int32_t step) override;

  private:
    static Parts load(const LlamaTarget & target, const pyfly_draft_model_config & config, int32_t draft_max,
                      bool is_loaded);

    LlamaTarget & target_;
};

} // namespace pyfly
