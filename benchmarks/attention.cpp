// What attention alone costs by cells, rows and heads: CpuAttention on a cache in F16 as llama.cpp lays it out, where
// the groups of a cell are neighbours. Milliseconds, the shortest of some repeats; and the median over the repeats of
// their time, divided by that of as many multiplications and additions of eight numbers at the processor's best, right
// before and after, so that other work on the machine hardly changes it.
//
//     cmake -S . -B build/core -G Ninja -DPYFLY_CORE_ONLY=ON -DCMAKE_BUILD_TYPE=Release
//     ninja -C build/core pyfly_attention && build/core/pyfly_attention [THREADS]
//
// To compare two versions, build it in both trees and run them in turns. (Versions before the one that came with this
// program have no set_chunk and add_chunk: leave these two lines out.)
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include <immintrin.h>

#include "llama/cpu_attention.h"

using namespace pyfly;

namespace {

// What CpuAttention knows of ggml's threads: where they wait, and whose turn it is.
struct Pool {
    int n_threads;
    std::atomic<int> chunk{0}, n_waiting{0}, round{0};

    explicit Pool(int n) : n_threads(n) {}
};

Pool & of(ggml_threadpool * pool) {
    return *reinterpret_cast<Pool *>(pool);
}

void wait(ggml_threadpool * pool) {
    Pool & own = of(pool);
    const int round = own.round;
    if (own.n_waiting.fetch_add(1) + 1 == own.n_threads) {
        own.n_waiting = 0;
        own.round++;
    } else {
        while (own.round == round) {
        }
    }
}

// Of four dimensions; nb of the first is `width`, the others as they follow.
ggml_tensor tensor(ggml_type type, std::vector<int64_t> ne, void * data, size_t width) {
    ggml_tensor out = {};
    out.type = type;
    out.data = data;
    ne.resize(4, 1);
    for (size_t i = 0; i < 4; i++) {
        out.ne[i] = ne[i];
        out.nb[i] = width;
        width *= static_cast<size_t>(ne[i]);
    }
    return out;
}

struct Case {
    int64_t n_cells, n_rows, n_heads, n_groups;
};

// n multiplications and additions, twelve at a time.
__attribute__((target("avx2,fma"))) void multiply_add(int64_t n) {
    const __m256 x = _mm256_set1_ps(1e-9f);
    __m256 a = x, b = x, c = x, d = x, e = x, f = x, g = x, h = x, i = x, j = x, k = x, l = x;
    for (; n > 0; n -= 12) {
        for (__m256 * sum : {&a, &b, &c, &d, &e, &f, &g, &h, &i, &j, &k, &l}) {
            *sum = _mm256_fmadd_ps(x, x, *sum);
            asm volatile("" : "+x"(*sum));
        }
    }
}

double milliseconds(int n_threads, const std::function<void(int thread)> & compute) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> others;
    for (int thread = 1; thread < n_threads; thread++) {
        others.emplace_back(compute, thread);
    }
    compute(0);
    for (std::thread & other : others) {
        other.join();
    }
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
    return time.count();
}

struct Times {
    double shortest, of_best; // ms; the median
};

Times measure(const Case & is, int n_threads) {
    constexpr int64_t size = 128;
    constexpr uint16_t value = 0x2C00, hidden = 0xFC00; // in F16: 1/16, -infinity
    const auto n = [](int64_t number) { return static_cast<size_t>(number); };
    std::vector<uint16_t> keys(n(is.n_groups * is.n_cells * size), value), values(keys), mask;
    std::vector<float> queries(n(is.n_heads * is.n_rows * size), 0.1f), result(queries.size());
    for (int64_t r = 0; r < is.n_rows; r++) {
        for (int64_t c = 0; c < is.n_cells; c++) {
            mask.push_back(c <= is.n_cells - is.n_rows + r ? 0 : hidden);
        }
    }
    ggml_tensor k = tensor(GGML_TYPE_F16, {size, is.n_cells, is.n_groups}, keys.data(), sizeof(uint16_t));
    ggml_tensor v = tensor(GGML_TYPE_F16, {size, is.n_cells, is.n_groups}, values.data(), sizeof(uint16_t));
    for (ggml_tensor * cells : {&k, &v}) {
        cells->nb[1] = n(is.n_groups * size) * sizeof(uint16_t);
        cells->nb[2] = n(size) * sizeof(uint16_t);
    }
    ggml_tensor q = tensor(GGML_TYPE_F32, {size, is.n_rows, is.n_heads}, queries.data(), sizeof(float));
    ggml_tensor hides = tensor(GGML_TYPE_F16, {is.n_cells, is.n_rows}, mask.data(), sizeof(uint16_t));
    ggml_tensor op = tensor(GGML_TYPE_F32, {size, is.n_heads, is.n_rows}, result.data(), sizeof(float));
    op.src[0] = &q;
    op.src[1] = &k;
    op.src[2] = &v;
    op.src[3] = &hides;
    const float scale = 0.088f;
    std::memcpy(op.op_params, &scale, sizeof(scale));

    CpuAttention attention;
    attention.barrier = wait;
    attention.set_chunk = [](ggml_threadpool * pool, int chunk) { of(pool).chunk = chunk; };
    attention.add_chunk = [](ggml_threadpool * pool, int more) { return of(pool).chunk.fetch_add(more); };
    size_t n_bytes = 0;
    attention.work_size(n_threads, &op, n_bytes);
    std::vector<char> work(n_bytes);
    const int64_t n_best = is.n_cells * is.n_rows * is.n_heads * 2 * size / 8 / n_threads;
    const int64_t n_timed = std::max<int64_t>(n_best, 1 << 24); // of a few milliseconds at least
    const auto best = [&] {
        const double time = milliseconds(n_threads, [&](int) { multiply_add(n_timed); });
        return time * static_cast<double>(n_best) / static_cast<double>(n_timed);
    };
    std::vector<double> times, of_best;
    for (int repeat = 0; repeat < (is.n_rows > 100 ? 5 : 30); repeat++) {
        Pool pool(n_threads);
        const double before = best();
        times.push_back(milliseconds(n_threads, [&](int thread) {
            ggml_internal::ComputeParams params = {
                thread, n_threads, n_bytes, work.data(), reinterpret_cast<ggml_threadpool *>(&pool), false};
            attention.compute_forward(&params, &op);
        }));
        of_best.push_back(2.0 * times.back() / (before + best()));
    }
    std::sort(of_best.begin(), of_best.end());
    return {*std::min_element(times.begin(), times.end()), of_best[of_best.size() / 2]};
}

} // namespace

int main(int n_arguments, char ** arguments) {
    const int n_threads = n_arguments > 1 ? std::max(1, std::atoi(arguments[1])) : 1;
    std::printf("| cells | rows | heads / groups | ms | of the best |\n| ---: | ---: | --- | ---: | ---: |\n");
    for (const Case & is : {Case{1024, 1, 12, 2},
                            {1024, 4, 12, 2},
                            {1024, 256, 12, 2},
                            {8192, 1, 12, 2},
                            {8192, 8, 12, 2},
                            {8192, 512, 12, 2},
                            {8192, 1, 32, 8},
                            {8192, 1, 32, 32},
                            {16384, 8, 12, 2},
                            {32768, 1, 12, 2},
                            {32768, 4, 12, 2},
                            {32768, 512, 12, 2},
                            {32768, 1, 32, 8},
                            {32768, 2, 32, 8},
                            {32768, 4, 32, 8},
                            {32768, 8, 32, 8}}) {
        const Times times = measure(is, n_threads);
        std::printf("| %lld | %lld | %lld / %lld | %.2f | %.2f |\n", static_cast<long long>(is.n_cells),
                    static_cast<long long>(is.n_rows), static_cast<long long>(is.n_heads),
                    static_cast<long long>(is.n_groups), times.shortest, times.of_best);
        std::fflush(stdout);
    }
    return 0;
}
