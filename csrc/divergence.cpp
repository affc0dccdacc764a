#include "divergence.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "error.h"
#include "rows.h"
#include "rows_kernels.h"

namespace pyfly {

namespace {

constexpr double never = -std::numeric_limits<double>::infinity(); // ln 0

// One outcome's share, from logarithms of probabilities. A probability of 0 adds nothing to a KL from it.
double term(Divergence kind, double ln_p, double ln_q) {
    const auto kl = [](double ln_a, double ln_b) { return ln_a > never ? std::exp(ln_a) * (ln_a - ln_b) : 0.0; };
    if (kind == Divergence::kl) {
        return kl(ln_q, ln_p);
    }
    if (kind == Divergence::kl_target) {
        return kl(ln_p, ln_q);
    }
    const double p = std::exp(ln_p), q = std::exp(ln_q);
    if (kind == Divergence::tv) {
        return 0.5 * std::abs(p - q);
    }
    const double ln_m = std::log(0.5 * (p + q));
    return kind == Divergence::js ? 0.5 * (kl(ln_p, ln_m) + kl(ln_q, ln_m)) : 0.5 * (kl(ln_m, ln_p) + kl(ln_m, ln_q));
}

// A distribution over the target's most probable tokens, and all others as the last outcome: their logarithms.
void read_top(const float * row, size_t n_vocab, const std::vector<TokenLogit> & top, std::vector<double> & ln) {
    thread_local std::vector<float> others; // kept from row to row: it is large
    others.assign(row, row + n_vocab);
    ln.clear();
    for (const TokenLogit & t : top) {
        ln.push_back(static_cast<double>(row[t.token]));
        others[static_cast<size_t>(t.token)] = -std::numeric_limits<float>::infinity();
    }
    const RowStats stats = row_stats(others.data(), n_vocab, 0);
    ln.push_back(stats.max.finite ? stats.log_sum_exp : never);
    const double max = *std::max_element(ln.begin(), ln.end());
    double sum = 0.0;
    for (const double x : ln) {
        sum += std::exp(x - max);
    }
    for (double & x : ln) {
        x -= max + std::log(sum);
    }
}

double of_top(Divergence kind, const float * p_row, const float * q_row, size_t n_vocab, size_t n_top) {
    thread_local std::vector<TokenLogit> top;
    thread_local std::vector<double> ln_p, ln_q;
    top_tokens(p_row, n_vocab, n_top, top);
    read_top(p_row, n_vocab, top, ln_p);
    read_top(q_row, n_vocab, top, ln_q);
    double sum = 0.0;
    for (size_t i = 0; i < ln_p.size(); i++) {
        sum += term(kind, ln_p[i], ln_q[i]);
    }
    return sum;
}

void require_finite(const RowMax & max) {
    if (!max.finite) {
        throw Error(PYFLY_STATUS_NOT_FINITE,
                    "a row of the draft has no distribution: NaN, +inf, or -inf everywhere; check the draft");
    }
}

RowScale scale_of(const RowStats & stats) {
    const double ln_sum = stats.log_sum_exp - static_cast<double>(stats.max.logit);
    return {stats.max.logit, std::exp(ln_sum), ln_sum};
}

} // namespace

double divergence(Divergence kind, const RowStats & target, const float * p_row, const float * q_row, size_t n_vocab,
                  int32_t n_top) {
    const size_t n = static_cast<size_t>(n_top);
    if (n > 0 && n < n_vocab) {
        require_finite(row_max(q_row, n_vocab));
        return std::max(of_top(kind, p_row, q_row, n_vocab, n), 0.0); // rounding
    }
    const RowStats draft = row_stats(q_row, n_vocab, 0);
    require_finite(draft.max);
    const double sum = row_kernels.divergence_sum(kind, p_row, q_row, n_vocab, scale_of(target), scale_of(draft));
    return std::max(sum, 0.0);
}

} // namespace pyfly
