#include "draft_token.h"

#include <cmath>
#include <string>

#include "error.h"

namespace pyfly {

RowMax require_row(const float * row, size_t n_vocab, const char * who) {
    const RowMax max = row_max(row, n_vocab);
    if (!max.finite) {
        throw Error(PYFLY_STATUS_NOT_FINITE,
                    std::string("the ") + who + " produced a logits row without a distribution; check its file");
    }
    return max;
}

DraftToken draft_token(const float * row, size_t n_vocab, const RowMax & max, double p_min, const DrawDraft & draw,
                       const DraftStop & stop, Proposal & out, std::optional<double> confidence) {
    double p = confidence.value_or(1.0);
    if (p_min > 0.0 || (stop && !confidence)) {
        const double of_row = std::exp(row_stats(row, n_vocab, 0).log_prob(max.logit));
        if (p_min > 0.0 && of_row < p_min) {
            return {};
        }
        p = confidence.value_or(of_row);
    }
    DraftStep step = DraftStep::goes_on;
    if (stop) {
        step = stop(p);
        out.confidence.push_back(static_cast<float>(p));
        if (step == DraftStep::ends_before) {
            out.dropped = max.token;
            return {};
        }
    }
    return {draw ? draw(row, n_vocab, out.drawn) : max.token, step == DraftStep::ends_behind};
}

} // namespace pyfly
