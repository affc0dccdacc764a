#include "sampler.h"

#include "error.h"
#include "rows.h"

namespace pyfly {

int32_t GreedySampler::choose(const float * row, size_t n_vocab) {
    const RowMax max = row_max(row, n_vocab);
    if (!max.finite) {
        throw Error(PYFLY_STATUS_NOT_FINITE,
                    "the target produced a logits row without a distribution (NaN, +inf, or -inf everywhere); "
                    "check the model file and the backend");
    }
    row_ = row;
    return max.token;
}

} // namespace pyfly
