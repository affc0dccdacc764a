// A draft model with another vocabulary: CrossVocabulary on those of llama.cpp.

#include "draft_model.h"
#include "drafters/cross_vocabulary.h"
#include "guard.h"
#include "llama/llama_tokenizer.h"

extern "C" pyfly_status pyfly_drafter_cross_new(pyfly_target * target, const pyfly_draft_model_config * config,
                                                pyfly_drafter ** out, pyfly_error * error) {
    using namespace pyfly;
    return guard(error, [&] {
        const LlamaTarget & llama = llama_target(target);
        auto own = std::make_unique<LlamaTokenizer>(llama_model_get_vocab(llama_get_model(llama.context())), "target");
        auto draft = std::make_unique<DraftModel>(llama, *config, /*is_translated=*/true);
        auto other = std::make_unique<LlamaTokenizer>(draft->vocabulary(), "draft model");
        *out = new pyfly_drafter{std::make_unique<CrossVocabulary>(std::move(own), std::move(other), std::move(draft))};
    });
}
