// The functions of pyfly.h that need llama.cpp.

#include "drafters/draft_model.h"
#include "guard.h"
#include "handles.h"
#include "llama_target.h"

using pyfly::Error;
using pyfly::guard;

extern "C" {

pyfly_status pyfly_target_llama_new(void * llama_context_pointer, pyfly_target ** out, pyfly_error * error) {
    return guard(error, [&] {
        if (llama_context_pointer == nullptr) {
            throw Error(PYFLY_STATUS_INVALID, "the llama context is closed");
        }
        *out =
            new pyfly_target{std::make_unique<pyfly::LlamaTarget>(static_cast<llama_context *>(llama_context_pointer))};
    });
}

pyfly_status pyfly_drafter_model_new(pyfly_target * target, const pyfly_draft_model_config * config,
                                     pyfly_drafter ** out, pyfly_error * error) {
    return guard(error, [&] {
        const auto * llama_target = dynamic_cast<const pyfly::LlamaTarget *>(target->impl.get());
        if (llama_target == nullptr) {
            throw Error(PYFLY_STATUS_INVALID, "a draft model needs a llama target");
        }
        *out = new pyfly_drafter{std::make_unique<pyfly::DraftModel>(*llama_target, *config)};
    });
}

} // extern "C"
