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

// Over the target's n_top most probable tokens, and all others as one.
double of_top(Divergence kind, const float * p_row, const Shares & p, const Shares & q, size_t n_top) {
    std::vector<size_t> order(p.p.size());
    std::iota(order.begin(), order.end(), 0);
    std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(n_top), order.end(),
                     [&](size_t a, size_t b) { return p_row[a] != p_row[b] ? p_row[a] > p_row[b] : a < b; });
    double sum = 0.0, p_rest = 0.0, q_rest = 0.0;
    for (size_t rank = 0; rank < order.size(); rank++) {
        const size_t i = order[rank];
        if (rank < n_top) {
            sum += term(kind, p.p[i], p.ln_p[i], q.p[i], q.ln_p[i]);
        } else {
            p_rest += p.p[i];
            q_rest += q.p[i];
        }
    }
    return sum + term(kind, p_rest, std::log(p_rest), q_rest, std::log(q_rest));
}

double of_all(Divergence kind, const Shares & p, const Shares & q) {
    double sum = 0.0;
    for (size_t i = 0; i < p.p.size(); i++) {
        sum += term(kind, p.p[i], p.ln_p[i], q.p[i], q.ln_p[i]);
    }
    return sum;
}

} // namespace

double divergence(Divergence kind, const float * p_row, const float * q_row, size_t n_vocab, int32_t n_top) {
    thread_local Shares p, q; // kept from row to row: they are large
    p.read(p_row, n_vocab);
    q.read(q_row, n_vocab);
    const size_t n = static_cast<size_t>(n_top);
    const double sum = n > 0 && n < n_vocab ? of_top(kind, p_row, p, q, n) : of_all(kind, p, q);
    return std::max(sum, 0.0); // rounding
}

} // namespace pyfly
