#include "speculative.h"

namespace pyfly {

namespace {

// max(p - q, 0), or p where rounding leaves nothing of that.
Weights residual(const Weights & p, const Weights & q) {
    Weights out;
    auto beside = q.begin();
    for (const Weight & w : p) {
        while (beside != q.end() && beside->token < w.token) {
            ++beside;
        }
        const double rest = w.p - (beside != q.end() && beside->token == w.token ? beside->p : 0.0);
        if (rest > 0.0) {
            out.push_back({w.token, rest});
        }
    }
    return out.empty() ? p : out;
}

} // namespace

int32_t choose_beside(const Weights & p, const Weights & q, int32_t drafted, Random & random) {
    if (random.uniform() * weight(q, drafted) < weight(p, drafted)) {
        return drafted;
    }
    return draw(residual(p, q), random.uniform());
}

} // namespace pyfly
