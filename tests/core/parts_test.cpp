// Whether a batch goes in parts, where it is known what is faster. No clock is read.

#undef NDEBUG
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>

#include "parts.h"

namespace {

using pyfly::BatchParts;

struct Outcome {
    double of_best; // time, relative to that of the faster way of every batch
    int n_changes;
};

// Batches of requests with as many rows each, which take `cost(step, n_parts)` but for what the machine does besides.
Outcome run(int n_steps, size_t n_requests, size_t n_rows, const std::function<double(int, size_t)> & cost,
            uint32_t seed, double noise = 0.1) {
    BatchParts parts;
    std::mt19937 rng(seed);
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> uniform(0.0, 1.0);
    double us = 0.0, us_best = 0.0;
    int n_changes = 0;
    size_t last = 1;
    for (int step = 0; step < n_steps; step++) {
        const size_t n = parts.choose(n_requests * n_rows, n_requests);
        assert(n >= 1 && n <= n_requests);
        const size_t n_cut = (n_requests * n_rows + BatchParts::n_rows_wanted - 1) / BatchParts::n_rows_wanted;
        assert(n == 1 || n == std::min(n_cut, n_requests));
        parts.observe(cost(step, n) * std::exp(noise * normal(rng)) * (uniform(rng) < 0.02 ? 5.0 : 1.0));
        us += cost(step, n);
        us_best += std::min(cost(step, 1), cost(step, n_cut));
        n_changes += n != last;
        last = n;
    }
    return {us / us_best, n_changes};
}

void test_small_batches_stay_whole() {
    BatchParts parts;
    for (const auto & [n_rows, n_requests] : {std::pair<size_t, size_t>{63, 63}, {64, 1}, {500, 1}, {1, 1}}) {
        for (int i = 0; i < 10; i++) {
            assert(parts.choose(n_rows, n_requests) == 1);
            parts.observe(100.0);
        }
    }
    assert(parts.choose(64, 2) == 1); // the first of the two tries
    parts.observe(100.0);
    assert(parts.choose(64, 2) == 2);
}

void test_the_faster_way_is_found_and_kept() {
    double worst = 1.0;
    for (const double factor : {0.4, 0.7, 0.9, 1.1, 1.4, 2.0}) { // of parts to the whole
        for (uint32_t seed = 0; seed < 50; seed++) {
            const Outcome o = run(400, 16, 5, [&](int, size_t n) { return 1000.0 * (n > 1 ? factor : 1.0); }, seed);
            worst = std::max(worst, o.of_best);
        }
    }
    std::printf("parts: at most %.3f of the faster way\n", worst);
    assert(worst < 1.05);
}

void test_what_costs_nothing_to_know_costs_little() {
    for (uint32_t seed = 0; seed < 20; seed++) { // no difference: whatever it does is right
        const Outcome o = run(400, 64, 1, [](int, size_t) { return 1000.0; }, seed);
        assert(o.of_best == 1.0);
    }
    // On a GPU parts take twice the time: the trials of a long run are under a hundredth of it.
    const Outcome o = run(2000, 64, 1, [](int, size_t n) { return n > 1 ? 2000.0 : 1000.0; }, 1);
    assert(o.of_best < 1.01 && o.n_changes < 40);
}

void test_requests_that_grow() {
    // Short requests are faster whole, long ones in parts.
    double worst = 1.0;
    for (uint32_t seed = 0; seed < 50; seed++) {
        const auto cost = [](int step, size_t n) { return n > 1 ? 1200.0 + step : 1000.0 + 3.0 * step; };
        worst = std::max(worst, run(600, 16, 5, cost, seed).of_best);
    }
    std::printf("parts: at most %.3f of the faster way, requests that grow\n", worst);
    assert(worst < 1.06);
}

} // namespace

int main() {
    test_small_batches_stay_whole();
    test_the_faster_way_is_found_and_kept();
    test_what_costs_nothing_to_know_costs_little();
    test_requests_that_grow();
}
