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

// One outcome of two distributions.
struct Outcome {
    double ln_p, ln_q, p, q;

    Outcome(double ln_p, double ln_q) : ln_p(ln_p), ln_q(ln_q), p(std::exp(ln_p)), q(std::exp(ln_q)) {}
};

// a ln(a / b) - a + b: both sum to 1, so the latter adds nothing to KL(a || b), but no term is negative with it, and
// small errors of the sums that rows are normalised with are hidden.
double kl_term(double a, double ln_a, double b, double ln_b) {
    return (ln_a > never ? a * (ln_a - ln_b) : 0.0) - a + b;
}

// An outcome's share of the divergence, >= 0.
double term(Divergence kind, const Outcome & x) {
    if (kind == Divergence::kl) {
        return kl_term(x.q, x.ln_q, x.p, x.ln_p);
    }
    if (kind == Divergence::kl_target) {
        return kl_term(x.p, x.ln_p, x.q, x.ln_q);
    }
    if (kind == Divergence::tv) {
        return 0.5 * std::abs(x.p - x.q);
    }
    const double m = 0.5 * (x.p + x.q);
    // Both may be too small for a number other than 0, while their logarithms are not.
    const double ln_m = m > 0.0 || kind == Divergence::js_code ? std::log(m) : std::max(x.ln_p, x.ln_q);
    return kind == Divergence::js ? 0.5 * (kl_term(x.p, x.ln_p, m, ln_m) + kl_term(x.q, x.ln_q, m, ln_m))
                                  : 0.5 * (kl_term(m, ln_m, x.p, x.ln_p) + kl_term(m, ln_m, x.q, x.ln_q));
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
        sum += term(kind, {ln_p[i], ln_q[i]});
    }
    return sum;
}

// Largest difference b - a of two rows' logits; +inf where one forbids what the other does not.
double largest_gap(const float * a, const float * b, size_t n) {
    constexpr size_t lanes = 16; // so that the compiler can use vectors without reordering a maximum
    float most[lanes];
    std::fill_n(most, lanes, -std::numeric_limits<float>::infinity());
    for (size_t start = 0; start < n; start += lanes) {
        for (size_t i = 0, m = std::min(lanes, n - start); i < m; i++) {
            const float gap = b[start + i] - a[start + i]; // NaN where both forbid it: larger than nothing
            most[i] = gap > most[i] ? gap : most[i];
        }
    }
    return static_cast<double>(*std::max_element(most, most + lanes));
}

// A divergence as far as some blocks of two rows tell it.
class Partial {
  public:
    // ln_p, ln_q: the rows' log_sum_exp.
    Partial(Divergence kind, const float * p_row, const float * q_row, size_t n_vocab, double ln_p, double ln_q)
        : kind_(kind), p_row_(p_row), q_row_(q_row), n_vocab_(n_vocab), ln_p_(ln_p), ln_q_(ln_q) {
        if (kind == Divergence::kl || kind == Divergence::js_code) {
            most_ln_ = largest_gap(p_row, q_row, n_vocab) - ln_q + ln_p;
        }
        if (kind == Divergence::kl_target || kind == Divergence::js_code) {
            most_ln_ = std::max(most_ln_, largest_gap(q_row, p_row, n_vocab) - ln_p + ln_q);
        }
    }

    void add_block(size_t block) {
        const size_t start = block * block_size, end = std::min(start + block_size, n_vocab_);
        for (size_t i = start; i < end; i++) {
            const Outcome x(static_cast<double>(p_row_[i]) - ln_p_, static_cast<double>(q_row_[i]) - ln_q_);
            const double more = term(kind_, x);
            divergence_ += more;
            above_ += x.p > x.q ? more : 0.0;
            p_above_ += x.p > x.q ? x.p : 0.0;
            p_sum_ += x.p;
            q_sum_ += x.q;
        }
    }

    // The divergence, once all blocks were added. Of the total variation: were p too large by a share e, what p exceeds
    // q by would be too large by e times the p of those tokens; e is how far the two sums are apart.
    double whole() const {
        const double above = 2.0 * above_, below = 2.0 * (divergence_ - above_);
        return kind_ == Divergence::tv ? above - (above - below) * p_above_ : divergence_;
    }

    // No less than the divergence. A token with probabilities p and q adds at most (p + q) / 2 to the total variation,
    // ln 2 times that to the Jensen-Shannon divergence, q ln(q / p) + p to KL(q || p), (p + q) / 4 |ln(q / p)| to the
    // mean's.
    double at_most() const {
        const double p = rest(p_sum_), q = rest(q_sum_), ln = std::max(most_ln_, 0.0) + 1e-4; // rounding of floats
        return divergence_ + (kind_ == Divergence::tv          ? 0.5 * (p + q)
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
        const double p = 1.0 - p_sum_, q = 1.0 - q_sum_;
        const double more = std::max(p, q) - rounding, less = std::max(std::min(p, q), 0.0) + rounding;
        if (more <= less) {
            return divergence_;
        }
        return divergence_ + term(kind_, {std::log(p > q ? more : less), std::log(p > q ? less : more)});
    }

  private:
    static constexpr double rounding = 1e-6; // of sums of probabilities, with much to spare
    static constexpr double ln_2 = 0.6931471805599453;

    static double rest(double seen) { return std::max(1.0 - seen, 0.0) + rounding; }

    Divergence kind_;
    const float *p_row_, *q_row_;
    size_t n_vocab_;
    double ln_p_, ln_q_;
    double most_ln_ = never;  // of any token's ln(q / p) or ln(p / q), whichever counts
    double divergence_ = 0.0; // of the tokens seen
    double above_ = 0.0;      // of those with p > q
    double p_above_ = 0.0;    // their p
    double p_sum_ = 0.0, q_sum_ = 0.0;
};

// What is wrong with a target's row is said elsewhere.
void require_draft_row(const RowMax & max) {
    if (!max.finite) {
        throw Error(PYFLY_STATUS_NOT_FINITE,
                    "a row of the draft has no distribution: NaN, +inf, or -inf everywhere; check the draft");
    }
}

} // namespace

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
    Partial partial(kind, p_row, q_row, n_vocab, target.log_sum_exp, log_sum_exp);
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
