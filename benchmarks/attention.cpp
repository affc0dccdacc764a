// What attention alone costs by cells, rows and heads: CpuAttention on a cache in F16 as llama.cpp lays it out, where
// the groups of a cell are neighbours. Milliseconds, the shortest of some repeats.
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
#include <limits>
#include <thread>
#include <vector>

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

double milliseconds(const Case & is, int n_threads) {
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
    double shortest = std::numeric_limits<double>::infinity();
    for (int repeat = 0; repeat < (is.n_rows > 100 ? 2 : 6); repeat++) {
        Pool pool(n_threads);
        const auto compute = [&](int thread) {
            ggml_internal::ComputeParams params = {
                thread, n_threads, n_bytes, work.data(), reinterpret_cast<ggml_threadpool *>(&pool), false};
            attention.compute_forward(&params, &op);
        };
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
        shortest = std::min(shortest, time.count());
    }
    return shortest;
}

} // namespace

int main(int n_arguments, char ** arguments) {
    const int n_threads = n_arguments > 1 ? std::max(1, std::atoi(arguments[1])) : 1;
    std::printf("| cells | rows | heads / groups | ms |\n| ---: | ---: | --- | ---: |\n");
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
        std::printf("| %lld | %lld | %lld / %lld | %.2f |\n", static_cast<long long>(is.n_cells),
                    static_cast<long long>(is.n_rows), static_cast<long long>(is.n_heads),
                    static_cast<long long>(is.n_groups), milliseconds(is, n_threads));
        std::fflush(stdout);
    }
    return 0;
}
