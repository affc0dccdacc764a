#include "distribution.h"

#include <algorithm>
#include <cmath>

namespace pyfly {

namespace {

bool is_before(const Weight & a, const Weight & b) {
    return a.token < b.token;
}

} // namespace

Weights softmax(Weights logits) {
    double max = -INFINITY;
    for (const Weight & w : logits) {
        max = std::max(max, w.p);
    }
    if (max == INFINITY) { // beside it nothing else counts
        for (Weight & w : logits) {
            w.p = w.p == INFINITY ? 0.0 : -INFINITY;
        }
        max = 0.0;
    }
    double total = 0.0;
    for (Weight & w : logits) {
        w.p = std::exp(w.p - max);
        total += w.p;
    }
    logits.erase(std::remove_if(logits.begin(), logits.end(), [](const Weight & w) { return !(w.p > 0.0); }),
                 logits.end());
    for (Weight & w : logits) {
        w.p /= total;
    }
    if (!std::is_sorted(logits.begin(), logits.end(), is_before)) {
        std::sort(logits.begin(), logits.end(), is_before);
    }
    return logits;
}

Weights softmax(const float * row, size_t n_vocab) {
    Weights logits(n_vocab);
    for (size_t i = 0; i < n_vocab; i++) {
        logits[i] = {static_cast<int32_t>(i), static_cast<double>(row[i])};
    }
    return softmax(std::move(logits));
}

double weight(const Weights & weights, int32_t token) {
    const auto found = std::lower_bound(weights.begin(), weights.end(), Weight{token, 0.0}, is_before);
    return found != weights.end() && found->token == token ? found->p : 0.0;
}

double sum(const Weights & weights) {
    double total = 0.0;
    for (const Weight & w : weights) {
        total += w.p;
    }
    return total;
}

int32_t draw(const Weights & weights, double u) {
    const double goal = u * sum(weights);
    double so_far = 0.0;
    for (const Weight & w : weights) {
        so_far += w.p;
        if (so_far > goal) {
            return w.token;
        }
    }
    return weights.back().token;
}

} // namespace pyfly
