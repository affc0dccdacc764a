#include "rows.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "rows_kernels.h"

namespace pyfly {

namespace {

RowKernels choose_kernels() {
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
    const bool no_nan = row_kernels.block_maxima(row, n_vocab, maxima.data());
    const auto best = std::max_element(maxima.begin(), maxima.end());
    const size_t start = static_cast<size_t>(best - maxima.begin()) * block_size;
    if (!no_nan || !std::isfinite(*best)) {
        return {-1, 0.0f, false};
    }
    const float * end = row + std::min(n_vocab, start + block_size);
    const float * found = std::find(row + start, end, *best);
    return {static_cast<int32_t>(found - row), *best, true};
}

// The n largest logits of a row, in order. Blocks are visited by falling maximum, so almost all of them are never
// opened.
void find_top(const float * row, size_t n_vocab, const std::vector<float> & maxima, size_t n,
              std::vector<TokenLogit> & top) {
    thread_local std::vector<size_t> order;
    order.resize(maxima.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return maxima[a] > maxima[b]; });
    top.clear(); // a heap, the last of them in front
    for (const size_t block : order) {
        if (top.size() == n && maxima[block] < top.front().logit) {
            break;
        }
        const size_t end = std::min(n_vocab, (block + 1) * block_size);
        for (size_t i = block * block_size; i < end; i++) {
            const TokenLogit candidate = {static_cast<int32_t>(i), row[i]};
            if (top.size() == n) {
                if (!ranks_before(candidate, top.front())) {
                    continue;
                }
                std::pop_heap(top.begin(), top.end(), ranks_before);
                top.pop_back();
            }
            top.push_back(candidate);
            std::push_heap(top.begin(), top.end(), ranks_before);
        }
    }
    std::sort_heap(top.begin(), top.end(), ranks_before);
}

} // namespace

const RowKernels row_kernels = choose_kernels();

const char * simd_level() {
    return row_kernels.level;
}

RowMax row_max(const float * row, size_t n_vocab) {
    return find_max(row, n_vocab, scratch_maxima(n_vocab));
}

void top_tokens(const float * row, size_t n_vocab, size_t n, std::vector<TokenLogit> & top) {
    std::vector<float> & maxima = scratch_maxima(n_vocab);
    row_kernels.block_maxima(row, n_vocab, maxima.data());
    find_top(row, n_vocab, maxima, std::min(n, n_vocab), top);
}

RowStats row_stats(const float * row, size_t n_vocab, int32_t n_top) {
    std::vector<float> & maxima = scratch_maxima(n_vocab);
    RowStats stats;
    stats.max = find_max(row, n_vocab, maxima);
    stats.n_top = 0;
    stats.log_sum_exp = 0.0;
    stats.entropy = 0.0;
    if (!stats.max.finite) {
        return stats;
    }
    const ExpSums sums = row_kernels.exp_sums(row, n_vocab, stats.max.logit);
    const double log_sum = std::log(sums.exp);
    stats.log_sum_exp = static_cast<double>(stats.max.logit) + log_sum;
    // H = -sum p (x - log_sum) with p = exp(x) / sum exp(x)
    stats.entropy = std::max(0.0, log_sum - sums.exp_times_x / sums.exp);
    if (n_top > 0) {
        thread_local std::vector<TokenLogit> top;
        stats.n_top = static_cast<int32_t>(std::min<size_t>(static_cast<size_t>(n_top), n_vocab));
        find_top(row, n_vocab, maxima, static_cast<size_t>(stats.n_top), top);
        std::copy(top.begin(), top.end(), stats.top.begin());
    }
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
