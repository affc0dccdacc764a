#include "speculative.h"

#include <algorithm>

namespace pyfly {

namespace {

// What is left of p where rounding left nothing of the residual.
Weights or_else(Weights rest, const Weights & p) {
    return rest.empty() ? p : std::move(rest);
}

} // namespace

Weights residual(const Weights & p, double scale, const Weights & q) {
    Weights out;
    auto beside = q.begin();
    for (const Weight & w : p) {
        while (beside != q.end() && beside->token < w.token) {
            ++beside;
        }
        const double rest = scale * w.p - (beside != q.end() && beside->token == w.token ? beside->p : 0.0);
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
    return draw(or_else(residual(p, 1.0, q), p), random.uniform());
}

int32_t choose_of_two(const Weights & p, int32_t drafted, Random & random) {
    const int32_t first = draw(p, random.uniform()), second = draw(p, random.uniform());
    return second == drafted ? second : first;
}

// In the paper's letters `reach` is p_i, the probability with which at least the first i tokens are kept, given them,
// and `accepted` is h_i. Every token on the way has its own end of the block, so that a block may end where the text
// does.
BlockChoice choose_block(const std::vector<BlockStep> & block, Random & random) {
    double reach = 1.0;
    BlockChoice choice = {0, {}};
    double reach_of_choice = 1.0;
    for (size_t n = 1; n <= block.size(); n++) {
        const BlockStep & last = block[n - 1];
        reach = std::min(reach * weight(last.p, last.drafted) / weight(last.q, last.drafted), 1.0);
        double accepted = reach;
        if (n < block.size()) {
            const double rest = sum(residual(block[n].p, reach, block[n].q));
            const double all = rest + 1.0 - reach;
            accepted = all > 0.0 ? rest / all : 0.0;
        }
        if (random.uniform() < accepted) {
            choice.n_accepted = n;
            reach_of_choice = reach;
        }
    }
    if (choice.n_accepted < block.size()) {
        const BlockStep & next = block[choice.n_accepted];
        choice.rest = or_else(residual(next.p, reach_of_choice, next.q), next.p);
    }
    return choice;
}

} // namespace pyfly
