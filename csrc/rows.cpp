#include "rows.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "rows_kernels.h"

namespace pyfly {

namespace {

struct Kernels {
    const char * level;
    bool (*block_maxima)(const float *, size_t, float *);
    ExpSums (*exp_sums)(const float *, size_t, float);
};

// The best this processor has; the environment variable PYFLY_SIMD ("avx2", "baseline") asks for less, for tests.
Kernels choose_kernels() {
#ifdef PYFLY_X86
    const char * wanted = std::getenv("PYFLY_SIMD");
    const std::string level = wanted ? wanted : "avx512";
    __builtin_cpu_init();
    if (level == "avx512" && __builtin_cpu_supports("avx512f")) {
        return {"avx512", avx512::block_maxima, avx512::exp_sums};
    }
    if (level != "baseline" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return {"avx2", avx2::block_maxima, avx2::exp_sums};
    }
#endif
    return {"baseline", baseline::block_maxima, baseline::exp_sums};
}

const Kernels kernels = choose_kernels();

bool ranks_before(const TokenLogit & a, const TokenLogit & b) {
    return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
}

// Block maxima of the row under inspection, kept per thread so that a row costs no allocation.
std::vector<float> & scratch_maxima(size_t n_vocab) {
    thread_local std::vector<float> maxima;
    maxima.resize((n_vocab + block_size - 1) / block_size);
    return maxima;
}

RowMax find_max(const float * row, size_t n_vocab, std::vector<float> & maxima) {
    const bool no_nan = kernels.block_maxima(row, n_vocab, maxima.data());
    const auto best = std::max_element(maxima.begin(), maxima.end());
    const size_t start = static_cast<size_t>(best - maxima.begin()) * block_size;
    if (!no_nan || !std::isfinite(*best)) {
        return {-1, 0.0f, false};
    }
    const float * end = row + std::min(n_vocab, start + block_size);
    const float * found = std::find(row + start, end, *best);
    return {static_cast<int32_t>(found - row), *best, true};
}

// The n_top largest logits. Blocks are visited by falling maximum, so almost all of them are never opened.
void find_top(const float * row, size_t n_vocab, const std::vector<float> & maxima, int32_t n_top, RowStats & stats) {
    stats.n_top = static_cast<int32_t>(std::min<size_t>(static_cast<size_t>(n_top), n_vocab));
    std::vector<size_t> order(maxima.size());
    for (size_t i = 0; i < order.size(); i++) {
        order[i] = i;
    }
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return maxima[a] > maxima[b]; });
    int32_t n = 0;
    for (const size_t block : order) {
        if (n == stats.n_top && maxima[block] < stats.top[n - 1].logit) {
            break;
        }
        const size_t end = std::min(n_vocab, (block + 1) * block_size);
        for (size_t i = block * block_size; i < end; i++) {
            const TokenLogit candidate = {static_cast<int32_t>(i), row[i]};
            if (n == stats.n_top && !ranks_before(candidate, stats.top[n - 1])) {
                continue;
            }
            int32_t at = n < stats.n_top ? n++ : n - 1;
            for (; at > 0 && ranks_before(candidate, stats.top[at - 1]); at--) {
                stats.top[at] = stats.top[at - 1];
            }
            stats.top[at] = candidate;
        }
    }
}

} // namespace

const char * simd_level() {
    return kernels.level;
}

RowMax row_max(const float * row, size_t n_vocab) {
    return find_max(row, n_vocab, scratch_maxima(n_vocab));
}

RowStats row_top(const float * row, size_t n_vocab, int32_t n_top) {
    std::vector<float> & maxima = scratch_maxima(n_vocab);
    RowStats stats;
    stats.max = find_max(row, n_vocab, maxima);
    stats.n_top = 0;
    stats.log_sum_exp = 0.0;
    stats.entropy = 0.0;
    if (stats.max.finite && n_top > 0) {
        find_top(row, n_vocab, maxima, n_top, stats);
    }
    return stats;
}

RowStats row_stats(const float * row, size_t n_vocab, int32_t n_top) {
    RowStats stats = row_top(row, n_vocab, n_top);
    if (!stats.max.finite) {
        return stats;
    }
    const ExpSums sums = kernels.exp_sums(row, n_vocab, stats.max.logit);
    const double log_sum = std::log(sums.exp);
    stats.log_sum_exp = static_cast<double>(stats.max.logit) + log_sum;
    // H = -sum p (x - log_sum) with p = exp(x) / sum exp(x)
    stats.entropy = std::max(0.0, log_sum - sums.exp_times_x / sums.exp);
    return stats;
}

double RowStats::top_entropy(int32_t n) const {
    double out = 0.0;
    for (int32_t i = 0; i < n; i++) {
        const double lp = log_prob(top[static_cast<size_t>(i)].logit);
        if (std::isfinite(lp)) {
            out -= std::exp(lp) * lp;
        }
    }
    return out;
}

} // namespace pyfly
