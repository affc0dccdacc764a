// A logistic gate over what is at hand at a mismatch, with weights that were learned: pyfly_cpp/bench/judge.py.

#include <algorithm>
#include <cmath>
#include <vector>

#include "error.h"
#include "rules.h"

namespace pyfly {

namespace {

constexpr double most_nats = 20.0;  // beyond it a number says no more
constexpr double least_ln_p = 25.0; // less probable tokens add less than 1e-5 nats together, if a draft is sane

double cut(double nats) {
    return std::clamp(nats, -most_nats, most_nats);
}

// KL(p || q), over the tokens that count.
double kl(const RowStats & target, const float * p_row, const RowStats & draft, const float * q_row, size_t n_vocab) {
    const float least = static_cast<float>(target.log_sum_exp - least_ln_p);
    double sum = 0.0;
    for (size_t i = 0; i < n_vocab; i++) {
        if (p_row[i] > least) {
            const double ln_p = target.log_prob(p_row[i]);
            sum += std::exp(ln_p) * (ln_p - draft.log_prob(q_row[i]));
        }
    }
    return sum;
}

// ln(1 + tokens before this one by falling logit, then rising token).
double ln_rank(const float * row, size_t n_vocab, int32_t token) {
    const float *at = row + token, logit = *at;
    const auto n = std::count_if(row, at, [=](float x) { return x >= logit; }) +
                   std::count_if(at, row + n_vocab, [=](float x) { return x > logit; });
    return std::log1p(static_cast<double>(n));
}

class Learned : public Rule {
  public:
    explicit Learned(const pyfly_gate_node & node)
        : weights_(&node - node.n, &node), least_(node.threshold - node.second) {
        require(std::isfinite(node.threshold) && std::isfinite(node.second),
                "a learned gate's threshold and bias must be finite numbers");
        for (const pyfly_gate_node & weight : weights_) {
            require(weight.n >= 0 && weight.n < PYFLY_N_FEATURES && std::isfinite(weight.threshold),
                    "a learned gate's weight must be a finite number, of a feature that exists");
            needs_draft_row_ = needs_draft_row_ || (weight.n >= PYFLY_FEATURE_DRAFT && weight.n <= PYFLY_FEATURE_KL);
            looks_at_region_ = looks_at_region_ || weight.n >= PYFLY_FEATURE_CODE;
        }
    }
    bool defers(const Evidence & evidence) const override {
        if (evidence.features == nullptr || (needs_draft_row_ && evidence.draft_row == nullptr)) {
            return false;
        }
        double score = 0.0;
        for (const pyfly_gate_node & weight : weights_) {
            score += weight.threshold * evidence.features[weight.n];
        }
        return score >= least_;
    }
    bool needs_draft_row() const override { return needs_draft_row_; }
    bool looks_at_region() const override { return looks_at_region_; }
    bool looks_at_features() const override { return true; }

  private:
    std::vector<pyfly_gate_node> weights_;
    double least_;
    bool needs_draft_row_ = false, looks_at_region_ = false;
};

} // namespace

Features features_of(const Evidence & evidence) {
    Features f = {};
    const size_t n_vocab = evidence.n_vocab;
    f[PYFLY_FEATURE_MARGIN] = cut(evidence.margin());
    f[PYFLY_FEATURE_TOP] = evidence.target.log_prob(evidence.target.max.logit);
    f[PYFLY_FEATURE_ENTROPY] = evidence.target.entropy;
    f[PYFLY_FEATURE_RANK] = ln_rank(evidence.row, n_vocab, evidence.drafted);
    if (const float * row = evidence.draft_row) {
        const RowStats draft = row_stats(row, n_vocab, 0);
        if (!draft.max.finite) {
            throw Error(PYFLY_STATUS_NOT_FINITE,
                        "a row of the draft has no distribution: NaN, +inf, or -inf everywhere; check the draft");
        }
        f[PYFLY_FEATURE_DRAFT] = cut(draft.log_prob(row[evidence.drafted]));
        f[PYFLY_FEATURE_DRAFT_RANK] = ln_rank(row, n_vocab, evidence.drafted);
        f[PYFLY_FEATURE_KL] = cut(kl(evidence.target, evidence.row, draft, row, n_vocab));
    }
    f[PYFLY_FEATURE_DEPTH] = std::log(static_cast<double>(evidence.depth));
    f[PYFLY_FEATURE_ANSWERED] = std::log1p(static_cast<double>(evidence.n_answered));
    if (evidence.region != PYFLY_REGION_PROSE) {
        f[static_cast<size_t>(PYFLY_FEATURE_CODE + evidence.region - PYFLY_REGION_CODE)] = 1.0;
    }
    return f;
}

// Gate has seen to it that the weights stand before the node.
std::unique_ptr<Rule> make_learned(const pyfly_gate_node & node) {
    return std::make_unique<Learned>(node);
}

} // namespace pyfly
