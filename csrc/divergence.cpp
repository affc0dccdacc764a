#include "divergence.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
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

RowScale scale_of(float max, double log_sum_exp) {
    const double ln_sum = log_sum_exp - static_cast<double>(max);
    return {max, std::exp(ln_sum), ln_sum};
}

// A divergence as far as some blocks of two rows tell it.
class Partial {
  public:
    Partial(Divergence kind, const float * p_row, const float * q_row, size_t n_vocab, const RowScale & p,
            const RowScale & q)
        : kind_(kind), p_row_(p_row), q_row_(q_row), n_vocab_(n_vocab), p_(p), q_(q) {
        if (kind == Divergence::kl || kind == Divergence::kl_target || kind == Divergence::js_code) {
            const LogitGaps gaps = row_kernels.logit_gaps(p_row, q_row, n_vocab);
            const double offset = static_cast<double>(q.max) + q.ln_sum - static_cast<double>(p.max) - p.ln_sum;
            const double q_over_p = static_cast<double>(gaps.q_over_p) - offset,
                         p_over_q = static_cast<double>(gaps.p_over_q) + offset;
            most_ln_ = kind == Divergence::kl          ? q_over_p
                       : kind == Divergence::kl_target ? p_over_q
                                                       : std::max(q_over_p, p_over_q);
        }
    }

    void add_block(size_t block) {
        const size_t start = block * block_size, n = std::min(block_size, n_vocab_ - start);
        const PairSums more = row_kernels.divergence_sums(kind_, p_row_ + start, q_row_ + start, n, p_, q_);
        seen_.divergence += more.divergence;
        seen_.tv_below += more.tv_below;
        seen_.p_above += more.p_above;
        seen_.p += more.p;
        seen_.q += more.q;
    }

    // The divergence, once all blocks were added. Of the total variation: were p too large by a share e, what p exceeds
    // q by would be too large by e times the p of those tokens; e is how far the two sums are apart.
    double whole() const {
        const double above = 2.0 * seen_.divergence, below = 2.0 * seen_.tv_below;
        return kind_ == Divergence::tv ? above - (above - below) * seen_.p_above : seen_.divergence;
    }

    // No less than the divergence. A token with probabilities p and q adds at most (p + q) / 2 to the total variation,
    // ln 2 times that to the Jensen-Shannon divergence, q ln(q / p) + p to KL(q || p), (p + q) / 4 |ln(q / p)| to the
    // mean's.
    double at_most() const {
        const double p = rest(seen_.p), q = rest(seen_.q), ln = std::max(most_ln_, 0.0) + 1e-4; // rounding of floats
        return so_far() + (kind_ == Divergence::tv          ? 0.5 * (p + q)
                           : kind_ == Divergence::js        ? 0.5 * (p + q) * ln_2
                           : kind_ == Divergence::kl        ? q * ln + p
                           : kind_ == Divergence::kl_target ? p * ln + q
                                                            : 0.25 * (p + q) * ln);
    }

    // No more than the divergence: what was not seen, taken as one token, diverges less.
    double at_least() const {
        if (most_ln_ == -never) {
            return -never; // one row forbids what the other needs
        }
        const double p = 1.0 - seen_.p, q = 1.0 - seen_.q;
        const double more = std::max(p, q) - rounding, less = std::max(std::min(p, q), 0.0) + rounding;
        if (more <= less) {
            return so_far();
        }
        const double ln_p = std::log(p > q ? more : less), ln_q = std::log(p > q ? less : more);
        const double lost = kind_ == Divergence::kl          ? std::exp(ln_p) - std::exp(ln_q)
                            : kind_ == Divergence::kl_target ? std::exp(ln_q) - std::exp(ln_p)
                                                             : 0.0;
        return so_far() + term(kind_, ln_p, ln_q) + lost;
    }

  private:
    static constexpr double rounding = 1e-6; // of sums of probabilities, with much to spare
    static constexpr double ln_2 = 0.6931471805599453;

    double so_far() const { return seen_.divergence + seen_.tv_below; }
    static double rest(double seen) { return std::max(1.0 - seen, 0.0) + rounding; }

    Divergence kind_;
    const float *p_row_, *q_row_;
    size_t n_vocab_;
    RowScale p_, q_;
    double most_ln_ = 0.0; // of any token's ln(q / p) or ln(p / q), whichever counts
    PairSums seen_;
};

} // namespace

void require_draft_row(const RowMax & max) {
    if (!max.finite) {
        throw Error(PYFLY_STATUS_NOT_FINITE,
                    "a row of the draft has no distribution: NaN, +inf, or -inf everywhere; check the draft");
    }
}

bool is_within(Divergence kind, double threshold, const RowStats & target, const float * p_row, const float * q_row,
               size_t n_vocab, int32_t n_top) {
    const size_t n = static_cast<size_t>(n_top);
    if (n > 0 && n < n_vocab) {
        require_draft_row(row_max(q_row, n_vocab));
        return of_top(kind, p_row, q_row, n_vocab, n) <= threshold;
    }
    // Kept from row to row: a row costs no allocation.
    thread_local std::vector<float> maxima, p_maxima;
    thread_local std::vector<size_t> order;
    maxima.resize((n_vocab + block_size - 1) / block_size);
    const bool no_nan = row_kernels.block_maxima(q_row, n_vocab, maxima.data());
    const float max = *std::max_element(maxima.begin(), maxima.end());
    require_draft_row({0, max, no_nan && std::isfinite(max)});
    // As row_stats, so that equal rows have equal sums.
    const double log_sum_exp = static_cast<double>(max) + std::log(row_kernels.exp_sums(q_row, n_vocab, max).exp);
    Partial partial(kind, p_row, q_row, n_vocab, scale_of(target.max.logit, target.log_sum_exp),
                    scale_of(max, log_sum_exp));
    // Blocks by falling maximum of q, the first ones holding nearly all of it; where p counts as much, by the larger
    // one of both rows' probabilities. Bounds are looked at after each block, and believed where they are off the
    // threshold by more than the sums can be.
    if (kind == Divergence::js || kind == Divergence::js_code) {
        p_maxima.resize(maxima.size());
        row_kernels.block_maxima(p_row, n_vocab, p_maxima.data());
        const float q_over_p = static_cast<float>(log_sum_exp - target.log_sum_exp);
        std::transform(maxima.begin(), maxima.end(), p_maxima.begin(), maxima.begin(),
                       [&](float of_q, float of_p) { return std::max(of_q, of_p + q_over_p); });
    }
    const double slack = 1e-6 + 1e-5 * threshold;
    const auto comes_later = [](size_t a, size_t b) { return maxima[a] < maxima[b]; };
    order.resize(maxima.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::make_heap(order.begin(), order.end(), comes_later);
    while (!order.empty()) {
        std::pop_heap(order.begin(), order.end(), comes_later);
        partial.add_block(order.back());
        order.pop_back();
        if (partial.at_least() > threshold + slack) {
            return false;
        }
        if (partial.at_most() < threshold - slack) {
            return true;
        }
    }
    return partial.whole() <= threshold;
}

} // namespace pyfly
