// make_sampler for builds of the pure core (tests, sanitizers, fuzzing): there are no llama.cpp chains.

#include "error.h"
#include "sampler.h"

namespace pyfly {

std::unique_ptr<Sampler> make_sampler(const void * llama_sampler_chain, bool, bool) {
    if (llama_sampler_chain != nullptr) {
        throw Error(PYFLY_STATUS_INVALID, "this build of the core has no llama.cpp sampler chains");
    }
    return std::make_unique<GreedySampler>();
}

} // namespace pyfly
