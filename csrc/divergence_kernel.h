// The pass over two logits rows whose distributions are compared, on top of rows_kernel.h: compiled with it for each
// instruction set. No fast-math and no standard templates here, either, for the reasons given there.
//
// Sums of terms that are never negative, so that what is close to 0 is exact, too. KL(a || b) is that of
// a ln(a / b) - a + b, which adds nothing, since both sum to 1; it also hides a small error of the sums that rows are
// normalised with, as the other divergences' terms do but the total variation's.

namespace pyfly {
namespace PYFLY_ROWS_LEVEL {

namespace {

// What is known of 16 tokens.
struct Pair {
    vfloat p, q;       // probabilities; 0 under exp(-87) of the favourite's
    vfloat ln_q_per_p; // ln(q / p), infinite where one is forbidden, NaN where both are
    vfloat p_logit, q_logit;
};

inline vfloat absolute(vfloat x) {
    return x < 0.0f ? -x : x;
}

// exp(x) * scale, x <= 0.
inline vfloat scaled_exp(vfloat x, vfloat scale) {
    const vfloat floor = broadcast(-87.0f);
    return x > floor ? exp_nonpositive(x > floor ? x : floor) * scale : vfloat{};
}

// add(pair, sums) for all tokens; the n_sums sums are added to `totals`, in double.
template <size_t n_sums, typename Add>
void sum_pairs(const float * p_row, const float * q_row, size_t n, const RowScale & p, const RowScale & q,
               double * totals, Add add) {
    const vfloat p_max = broadcast(p.max), q_max = broadcast(q.max);
    const vfloat p_share = broadcast(static_cast<float>(1.0 / p.sum)),
                 q_share = broadcast(static_cast<float>(1.0 / q.sum));
    const vfloat offset = broadcast(static_cast<float>(q.ln_sum - p.ln_sum));
    const auto add_vectors = [&](vfloat p_logits, vfloat q_logits, vfloat * sums) {
        const vfloat dp = p_logits - p_max, dq = q_logits - q_max;
        add(Pair{scaled_exp(dp, p_share), scaled_exp(dq, q_share), dq - dp - offset, p_logits, q_logits}, sums);
    };
    for (size_t start = 0; start < n; start += block_size) { // flushed to double, as in exp_sums
        const size_t end = block_end(start, n);
        vfloat sums[n_sums] = {};
        size_t i = start;
        for (; i + lanes <= end; i += lanes) {
            add_vectors(load(p_row + i), load(q_row + i), sums);
        }
        if (i < end) {
            vfloat p_rest = broadcast(-__builtin_inff()), q_rest = p_rest;
            for (size_t lane = 0; i + lane < end; lane++) {
                p_rest[lane] = p_row[i + lane];
                q_rest[lane] = q_row[i + lane];
            }
            add_vectors(p_rest, q_rest, sums);
        }
        for (size_t j = 0; j < n_sums; j++) {
            for (size_t lane = 0; lane < lanes; lane++) {
                totals[j] += static_cast<double>(sums[j][lane]);
            }
        }
    }
}

// a ln(a / b) - a + b = a (d - 1 + exp(-d)) with d = ln(a / b): by its series where d is small. Where b is forbidden
// and a is not, it is infinite, however small a is.
inline vfloat kl_term(vfloat a, vfloat b, vfloat d, vfloat a_logit, vfloat b_logit) {
    const vfloat infinity = broadcast(__builtin_inff());
    vfloat poly = broadcast(1.0f / 40320.0f);
    poly = poly * d - 1.0f / 5040.0f;
    poly = poly * d + 1.0f / 720.0f;
    poly = poly * d - 1.0f / 120.0f;
    poly = poly * d + 1.0f / 24.0f;
    poly = poly * d - 1.0f / 6.0f;
    poly = poly * d + 0.5f;
    const vfloat of_some = absolute(d) < 0.5f ? a * (poly * (d * d)) : a * (d - 1.0f) + b;
    const vfloat of_none = a_logit != -infinity ? (b_logit == -infinity ? infinity : b) : b;
    return a > 0.0f ? of_some : of_none;
}

// s = p + q and t = |p - q| / s, 0 where both are 0. ln(1 + t) for t >= 1/2 is ln 1.75 and the series of ln(1 + x).
struct Halves {
    vfloat s, t, u, ln_more; // u = t^2

    explicit Halves(const Pair & x) : s(x.p + x.q) {
        t = s > 0.0f ? absolute(x.p - x.q) / s : vfloat{};
        u = t * t;
        const vfloat y = (t - 0.75f) * (1.0f / 1.75f);
        ln_more = broadcast(1.0f / 7.0f);
        ln_more = ln_more * y - 1.0f / 6.0f;
        ln_more = ln_more * y + 1.0f / 5.0f;
        ln_more = ln_more * y - 1.0f / 4.0f;
        ln_more = ln_more * y + 1.0f / 3.0f;
        ln_more = ln_more * y - 0.5f;
        ln_more = ln_more * y + 1.0f;
        ln_more = ln_more * y + 0.559615788f;
    }
};

// (p ln(2p / s) + q ln(2q / s)) / 2 = s / 4 ((1 + t) ln(1 + t) + (1 - t) ln(1 - t)), the latter by its series. The
// larger of 2p / s and 2q / s is 1 + t, and the smaller one |ln(q / p)| below it.
inline vfloat js_term(const Pair & x) {
    const Halves h(x);
    vfloat poly = broadcast(1.0f / 120.0f); // of u^k / (k (2k - 1))
    poly = poly * h.u + 1.0f / 91.0f;
    poly = poly * h.u + 1.0f / 66.0f;
    poly = poly * h.u + 1.0f / 45.0f;
    poly = poly * h.u + 1.0f / 28.0f;
    poly = poly * h.u + 1.0f / 15.0f;
    poly = poly * h.u + 1.0f / 6.0f;
    poly = poly * h.u + 1.0f;
    const vfloat less = x.p < x.q ? x.p : x.q;
    const vfloat far = h.s * h.ln_more - (less > 0.0f ? less * absolute(x.ln_q_per_p) : vfloat{});
    return h.t < 0.5f ? 0.25f * h.s * (poly * h.u) : 0.5f * far;
}

// - s / 4 ln(4 p q / s^2) = - s / 4 ln(1 - t^2), the latter by its series. Where one of them is forbidden, it is
// infinite, however small the other is.
inline vfloat js_code_term(const Pair & x) {
    const Halves h(x);
    vfloat poly = broadcast(1.0f / 10.0f); // of u^k / k
    poly = poly * h.u + 1.0f / 9.0f;
    poly = poly * h.u + 1.0f / 8.0f;
    poly = poly * h.u + 1.0f / 7.0f;
    poly = poly * h.u + 1.0f / 6.0f;
    poly = poly * h.u + 1.0f / 5.0f;
    poly = poly * h.u + 1.0f / 4.0f;
    poly = poly * h.u + 1.0f / 3.0f;
    poly = poly * h.u + 0.5f;
    poly = poly * h.u + 1.0f;
    const vfloat far = absolute(x.ln_q_per_p) - 2.0f * h.ln_more;
    const vfloat of_none = absolute(x.ln_q_per_p) == __builtin_inff() ? absolute(x.ln_q_per_p) : vfloat{};
    return h.s > 0.0f ? 0.25f * h.s * (h.t < 0.5f ? poly * h.u : far) : of_none;
}

// |p - q|, the larger one of them times 1 - exp(-|d|), d = ln(q / p): by its series where d is small.
inline vfloat tv_term(const Pair & x) {
    const vfloat d = absolute(x.ln_q_per_p), larger = x.p > x.q ? x.p : x.q;
    vfloat poly = broadcast(1.0f / 5040.0f);
    poly = 1.0f / 720.0f - poly * d;
    poly = 1.0f / 120.0f - poly * d;
    poly = 1.0f / 24.0f - poly * d;
    poly = 1.0f / 6.0f - poly * d;
    poly = 0.5f - poly * d;
    poly = 1.0f - poly * d;
    return d < 0.5f ? larger * (poly * d) : absolute(x.p - x.q);
}

PairSums total_variation(const float * p_row, const float * q_row, size_t n, const RowScale & p, const RowScale & q) {
    double sums[5] = {};
    sum_pairs<5>(p_row, q_row, n, p, q, sums, [](const Pair & x, vfloat * out) {
        const vfloat apart = 0.5f * tv_term(x);
        const vint is_more = x.ln_q_per_p < 0.0f;
        out[0] += is_more ? apart : vfloat{};
        out[1] += is_more ? vfloat{} : apart;
        out[2] += is_more ? x.p : vfloat{};
        out[3] += x.p;
        out[4] += x.q;
    });
    return {sums[0], sums[1], sums[2], sums[3], sums[4]};
}

template <typename Term>
PairSums sums_of_terms(const float * p_row, const float * q_row, size_t n, const RowScale & p, const RowScale & q,
                       Term term) {
    double sums[3] = {};
    sum_pairs<3>(p_row, q_row, n, p, q, sums, [&](const Pair & x, vfloat * out) {
        out[0] += term(x);
        out[1] += x.p;
        out[2] += x.q;
    });
    return {sums[0], 0.0, 0.0, sums[1], sums[2]};
}

} // namespace

PairSums divergence_sums(Divergence kind, const float * p_row, const float * q_row, size_t n, const RowScale & p,
                         const RowScale & q) {
    switch (kind) {
        case Divergence::kl:
            return sums_of_terms(p_row, q_row, n, p, q,
                                 [](const Pair & x) { return kl_term(x.q, x.p, x.ln_q_per_p, x.q_logit, x.p_logit); });
        case Divergence::kl_target:
            return sums_of_terms(p_row, q_row, n, p, q,
                                 [](const Pair & x) { return kl_term(x.p, x.q, -x.ln_q_per_p, x.p_logit, x.q_logit); });
        case Divergence::js:
            return sums_of_terms(p_row, q_row, n, p, q, js_term);
        case Divergence::js_code:
            return sums_of_terms(p_row, q_row, n, p, q, js_code_term);
        default:
            return total_variation(p_row, q_row, n, p, q);
    }
}

LogitGaps logit_gaps(const float * p_row, const float * q_row, size_t n) {
    vfloat most[2] = {broadcast(-__builtin_inff()), broadcast(-__builtin_inff())}; // q - p, p - q
    size_t i = 0;
    for (; i + lanes <= n; i += lanes) {
        const vfloat d = load(q_row + i) - load(p_row + i); // NaN where both forbid it: larger than nothing
        most[0] = d > most[0] ? d : most[0];
        most[1] = -d > most[1] ? -d : most[1];
    }
    LogitGaps out = {horizontal_max(most[0]), horizontal_max(most[1])};
    for (; i < n; i++) {
        const float d = q_row[i] - p_row[i];
        out.q_over_p = d > out.q_over_p ? d : out.q_over_p;
        out.p_over_q = -d > out.p_over_q ? -d : out.p_over_q;
    }
    return out;
}

} // namespace PYFLY_ROWS_LEVEL
} // namespace pyfly
