// How long chunks of prompts become. No clock is read.

#undef NDEBUG
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdio>
#include <random>

#include "prompt_chunks.h"

namespace {

using pyfly::PromptChunks;

// A machine: microseconds of a step with so many tokens.
struct Machine {
    double us_of_step, us_of_token;
    double us(double n) const { return us_of_step + us_of_token * n; }
};

// Steps of one running request while prompts are read; returns the longest of the last 40.
double longest(PromptChunks & chunks, const Machine & machine, int32_t & n, double noise = 0.0) {
    std::mt19937 rng(1);
    std::normal_distribution<double> normal;
    double most = 0.0;
    for (int step = 0; step < 60; step++) {
        n = chunks.n();
        const double us = machine.us(n + 1);
        chunks.observe(static_cast<size_t>(n), true, us * std::exp(noise * normal(rng)));
        most = step < 20 ? most : std::max(most, us);
    }
    return most;
}

// Chunks of at most 512 tokens that may take 200 ms, on a machine whose steps without a prompt are known.
PromptChunks of(const Machine & machine) {
    PromptChunks chunks;
    chunks.configure(512, 200'000);
    chunks.observe(0, true, machine.us(1));
    return chunks;
}

void test_without_a_limit_a_chunk_is_a_batch() {
    PromptChunks chunks;
    chunks.configure(512, 0);
    assert(chunks.n() == 512);
    chunks.observe(512, true, 1e9);
    assert(chunks.n() == 512);
}

void test_a_chunk_takes_what_it_may() {
    for (const Machine & machine : {Machine{35e3, 2e3}, Machine{5e3, 20.0}, Machine{1e5, 8e3}, Machine{1e3, 1e3}}) {
        for (const bool is_known : {false, true}) { // of an idle engine's prompt
            PromptChunks chunks;
            chunks.configure(512, 200'000);
            if (is_known) {
                chunks.observe(512, false, machine.us(512));
            } else {
                assert(chunks.n() == PromptChunks::n_least);
            }
            chunks.observe(0, true, machine.us(1));
            int32_t n = 0;
            const double us = longest(chunks, machine, n);
            assert(us <= 1.1 * (machine.us(1) + 200'000));
            assert(n == 512 || us >= 0.9 * (machine.us(1) + 200'000));
            longest(chunks, machine, n, 0.3);
            assert(n >= PromptChunks::n_least && (n == 512 || machine.us(n) < 2 * (machine.us(1) + 200'000)));
        }
    }
}

void test_a_slow_step_may_be_doubled_and_a_chunk_has_its_least() {
    const Machine machine = {1e6, 20e3};
    PromptChunks chunks = of(machine);
    int32_t n = 0;
    const double us = longest(chunks, machine, n);
    assert(us > 1.9e6 && us < 2.2e6);
    PromptChunks least;
    least.configure(512, 1);
    longest(least, machine, n);
    assert(n == PromptChunks::n_least);
    least.configure(5, 1);
    assert(least.n() == 5);
}

void test_a_prompts_last_tokens_say_little() {
    const Machine machine = {30e3, 1e3};
    PromptChunks chunks = of(machine);
    int32_t n = 0;
    longest(chunks, machine, n);
    for (int i = 0; i < 20; i++) {
        chunks.observe(2, true, machine.us(3));
    }
    assert(chunks.n() == n);
}

void test_one_slow_step_changes_little() {
    const Machine machine = {30e3, 1e3};
    PromptChunks chunks = of(machine);
    int32_t n = 0;
    longest(chunks, machine, n);
    chunks.observe(static_cast<size_t>(n), true, 30 * machine.us(n));
    assert(chunks.n() > n / 2);
}

} // namespace

int main() {
    test_without_a_limit_a_chunk_is_a_batch();
    test_a_chunk_takes_what_it_may();
    test_a_slow_step_may_be_doubled_and_a_chunk_has_its_least();
    test_a_prompts_last_tokens_say_little();
    test_one_slow_step_changes_little();
    std::puts("prompt chunks: ok");
    return 0;
}
