#include "speculative.h"

#include <algorithm>

namespace pyfly {

namespace {

// What is left of p where rounding left nothing of the residual.
Weights or_else(Weights rest, const Weights & p) {
    return rest.empty() ? p : std::move(rest);
}

} // namespace

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
    return out;
}

int32_t choose_beside(const Weights & p, const Weights & q, int32_t drafted, Random & random) {
    if (random.uniform() * weight(q, drafted) < weight(p, drafted)) {
        return drafted;
    }
    return draw(or_else(residual(p, q), p), random.uniform());
}

} // namespace pyfly
