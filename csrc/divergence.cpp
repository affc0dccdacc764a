#include "divergence.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace pyfly {

namespace {

// A row's distribution: probabilities and their logarithms, -inf for a forbidden token.
struct Shares {
    std::vector<double> p, ln_p;

    void read(const float * row, size_t n) {
        const double max = static_cast<double>(*std::max_element(row, row + n));
        p.resize(n);
        ln_p.resize(n);
        double sum = 0.0;
        for (size_t i = 0; i < n; i++) {
            ln_p[i] = static_cast<double>(row[i]) - max;
            p[i] = std::exp(ln_p[i]);
            sum += p[i];
        }
        const double ln_sum = std::log(sum);
        for (size_t i = 0; i < n; i++) {
            p[i] /= sum;
            ln_p[i] -= ln_sum;
        }
    }
};

// One outcome's share. A probability of 0 adds nothing to a KL from it.
double term(Divergence kind, double p, double ln_p, double q, double ln_q) {
    const auto kl = [](double a, double ln_a, double ln_b) { return a > 0.0 ? a * (ln_a - ln_b) : 0.0; };
    if (kind == Divergence::kl) {
        return kl(q, ln_q, ln_p);
    }
    if (kind == Divergence::kl_target) {
        return kl(p, ln_p, ln_q);
    }
    if (kind == Divergence::tv) {
        return 0.5 * std::abs(p - q);
    }
    const double m = 0.5 * (p + q), ln_m = std::log(m);
    return kind == Divergence::js ? 0.5 * (kl(p, ln_p, ln_m) + kl(q, ln_q, ln_m))
                                  : 0.5 * (kl(m, ln_m, ln_p) + kl(m, ln_m, ln_q));
}

// Moves the shares of the n_top most probable tokens of the target to the front, and the rest as one behind them.
void keep_top(const float * p_row, Shares & p, Shares & q, size_t n_top) {
    std::vector<size_t> order(p.p.size());
    std::iota(order.begin(), order.end(), 0);
    const auto end = order.begin() + static_cast<std::ptrdiff_t>(n_top);
    std::nth_element(order.begin(), end, order.end(),
                     [&](size_t a, size_t b) { return p_row[a] != p_row[b] ? p_row[a] > p_row[b] : a < b; });
    for (Shares * shares : {&p, &q}) {
        Shares top;
        double rest = 0.0;
        for (auto i = order.begin(); i != order.end(); i++) {
            if (i < end) {
                top.p.push_back(shares->p[*i]);
                top.ln_p.push_back(shares->ln_p[*i]);
            } else {
                rest += shares->p[*i];
            }
        }
        top.p.push_back(rest);
        top.ln_p.push_back(std::log(rest));
        *shares = std::move(top);
    }
}

} // namespace

double divergence(Divergence kind, const float * p_row, const float * q_row, size_t n_vocab, int32_t n_top) {
    thread_local Shares p, q; // a judged row costs no allocation
    p.read(p_row, n_vocab);
    q.read(q_row, n_vocab);
    if (n_top > 0 && static_cast<size_t>(n_top) < n_vocab) {
        keep_top(p_row, p, q, static_cast<size_t>(n_top));
    }
    double sum = 0.0;
    for (size_t i = 0; i < p.p.size(); i++) {
        sum += term(kind, p.p[i], p.ln_p[i], q.p[i], q.ln_p[i]);
    }
    return std::max(sum, 0.0); // rounding
}

} // namespace pyfly
