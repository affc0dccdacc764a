// CpuAttention on random shapes, masks, orders of cells and threads: each row alone gives the bits that it has among
// others, and they are right. PYFLY_FUZZ_CASES is how many.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "kernels/attention.h"
#include "llama/cpu_attention.h"

#ifndef _WIN32
#include <sys/wait.h>
#include <unistd.h>
#endif

using namespace pyfly;

namespace {

constexpr uint16_t hidden = 0xFC00, infinity = 0x7C00; // in F16
constexpr float quantum = 8.0f;                        // quantised numbers are multiples of its inverse

// Where threads wait for each other, in place of ggml's.
class Barrier {
  public:
    explicit Barrier(int n) : n_(n) {}

    void wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        const int round = round_;
        if (++n_waiting_ == n_) {
            n_waiting_ = 0;
            round_++;
            all_.notify_all();
        } else {
            all_.wait(lock, [&] { return round != round_; });
        }
    }

  private:
    std::mutex mutex_;
    std::condition_variable all_;
    int n_, n_waiting_ = 0, round_ = 0;
};

struct Pool {
    Barrier barrier;
    std::atomic<int> chunk{0};

    explicit Pool(int n) : barrier(n) {}
};

void wait(ggml_threadpool * pool) {
    reinterpret_cast<Pool *>(pool)->barrier.wait();
}

void set_chunk(ggml_threadpool * pool, int value) {
    reinterpret_cast<Pool *>(pool)->chunk = value;
}

int add_chunk(ggml_threadpool * pool, int value) {
    return reinterpret_cast<Pool *>(pool)->chunk.fetch_add(value);
}

ggml_tensor tensor(ggml_type type, std::vector<int64_t> ne, void * data) {
    ggml_tensor out = {};
    out.type = type;
    out.data = data;
    ne.resize(4, 1);
    size_t stride = ggml_type_size(type);
    for (size_t i = 0; i < 4; i++) {
        out.ne[i] = ne[i];
        out.nb[i] = stride;
        stride = i == 0 ? ggml_row_size(type, ne[0]) : stride * static_cast<size_t>(ne[i]);
    }
    return out;
}

// Halves in a cache of another type, which holds them as they are: multiples of its scale, where it has one.
std::vector<uint8_t> encoded(ggml_type type, const std::vector<uint16_t> & halves) {
    std::vector<uint8_t> out(ggml_row_size(type, static_cast<int64_t>(halves.size())));
    for (size_t i = 0; i < halves.size(); i++) {
        const float value = ggml_fp16_to_fp32(halves[i]);
        if (type == GGML_TYPE_F16) {
            std::memcpy(&out[2 * i], &halves[i], 2);
        } else if (type == GGML_TYPE_BF16) {
            uint32_t bits;
            std::memcpy(&bits, &value, sizeof(bits));
            const uint16_t upper = static_cast<uint16_t>(bits >> 16);
            std::memcpy(&out[2 * i], &upper, 2);
        } else {
            const bool is_q8 = type == GGML_TYPE_Q8_0;
            const int q = static_cast<int>(value * quantum);
            uint8_t * const block = &out[i / 32 * (is_q8 ? 34 : 18)];
            const ggml_fp16_t scale = ggml_fp32_to_fp16(1.0f / quantum);
            std::memcpy(block, &scale, sizeof(scale));
            uint8_t & byte = block[2 + i % (is_q8 ? 32 : 16)];
            byte = static_cast<uint8_t>(is_q8 ? q : i % 32 < 16 ? byte | (q + 8) : byte | (q + 8) << 4);
        }
    }
    return out;
}

// Numbers of one operation, in the order of tensors: the last index counts fastest.
struct Case {
    size_t key_size, value_size, n_groups, n_each, n_heads, n_cells, n_rows, n_streams;
    float scale, cap, most_bias; // ALiBi's, or 0
    bool has_sinks;
    ggml_type key_type, value_type;
    std::vector<uint16_t> keys, values, mask; // [n_streams][n_groups][n_cells][..], [n_streams][n_rows][n_cells]
    std::vector<float> queries, sinks;        // [n_streams][n_heads][n_rows][key_size], [n_heads]

    bool sees(size_t stream, size_t r, size_t c) const { return mask[(stream * n_rows + r) * n_cells + c] != hidden; }
};

class Random {
  public:
    explicit Random(uint32_t seed) : engine_(seed) {}

    size_t between(size_t low, size_t high) { return low + engine_() % (high - low + 1); }
    bool one_in(size_t n) { return between(1, n) == 1; }
    float normal() { return normal_(engine_); }
    uint16_t half() { return static_cast<uint16_t>((engine_() & 0x83FF) | between(12, 15) << 10); } // 1/8 .. 2
    uint16_t quantised_half() { return ggml_fp32_to_fp16((static_cast<float>(between(0, 15)) - 8.0f) / quantum); }

  private:
    std::mt19937 engine_;
    std::normal_distribution<float> normal_;
};

// Who sees what: the cells before its own; a window of them; any; those of one of three texts, whose rows alternate.
Case random_case(Random & random, bool is_large) {
    Case of = {};
    of.key_size = 8 * random.between(1, 17);
    of.value_size = random.one_in(3) ? 8 * random.between(1, 17) : of.key_size;
    of.n_groups = random.between(1, 4);
    of.n_each = random.between(1, 5);
    of.n_cells = random.between(1, 200);
    of.n_rows = random.between(1, random.one_in(3) ? 70 : 12);
    of.n_streams = random.one_in(5) ? random.between(2, 3) : 1;
    if (is_large) { // scores of all rows do not fit in the work memory
        of.key_size = of.value_size = 8;
        of.n_groups = 4;
        of.n_each = 8;
        of.n_cells = random.between(4000, 5000);
        of.n_rows = random.between(9, 17);
        of.n_streams = 1;
    }
    const auto random_type = [&](size_t size) {
        const ggml_type types[] = {GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0};
        return random.one_in(2) ? types[random.between(0, size % 32 == 0 ? 3 : 1)] : GGML_TYPE_F16;
    };
    of.key_type = random_type(of.key_size);
    of.value_type = random_type(of.value_size);
    of.n_heads = of.n_groups * of.n_each;
    of.scale = 1.0f / std::sqrt(static_cast<float>(of.key_size));
    of.cap = random.one_in(4) ? 20.0f : 0.0f;
    of.most_bias = random.one_in(4) ? 8.0f : 0.0f;
    of.has_sinks = random.one_in(4);
    of.keys.resize(of.n_streams * of.n_groups * of.n_cells * of.key_size);
    of.values.resize(of.n_streams * of.n_groups * of.n_cells * of.value_size);
    for (std::vector<uint16_t> * halves : {&of.keys, &of.values}) {
        const bool is_half = (halves == &of.keys ? of.key_type : of.value_type) == GGML_TYPE_F16;
        std::generate(halves->begin(), halves->end(),
                      [&] { return is_half ? random.half() : random.quantised_half(); });
    }
    of.queries.resize(of.n_streams * of.n_heads * of.n_rows * of.key_size);
    of.sinks.resize(of.n_heads);
    for (std::vector<float> * numbers : {&of.queries, &of.sinks}) {
        std::generate(numbers->begin(), numbers->end(), [&] { return random.normal(); });
    }
    const size_t kind = random.between(0, 3), window = random.between(1, of.n_cells);
    for (size_t stream = 0; stream < of.n_streams; stream++) {
        for (size_t r = 0; r < of.n_rows; r++) {
            for (size_t c = 0; c < of.n_cells; c++) {
                const bool is_before = c + of.n_rows <= of.n_cells + r;
                const bool is_seen = kind == 0   ? is_before
                                     : kind == 1 ? is_before && c + of.n_rows + window > of.n_cells + r
                                     : kind == 2 ? random.one_in(3)
                                                 : is_before && c * 7 / 5 % 3 == r / 7 % 3;
                const float distance = static_cast<float>(of.n_cells) - static_cast<float>(c);
                of.mask.push_back(!is_seen              ? hidden
                                  : of.most_bias > 0.0f ? ggml_fp32_to_fp16(-distance)
                                  : random.one_in(9)    ? 0x3800 // 0.5
                                                        : 0);
            }
        }
    }
    return of;
}

// Rows first..first + n - 1, [n_streams][n][n_heads][value_size].
std::vector<float> compute(CpuAttention & attention, const Case & of, const ggml_tensor & cache, size_t first, size_t n,
                           int n_threads) {
    const auto i = [](size_t number) { return static_cast<int64_t>(number); };
    Case own = of; // as tensors have it, not const
    std::vector<uint8_t> keys = encoded(of.key_type, of.keys), values = encoded(of.value_type, of.values);
    ggml_tensor k = tensor(of.key_type, {i(of.key_size), i(of.n_cells), i(of.n_groups), i(of.n_streams)}, keys.data());
    ggml_tensor v =
        tensor(of.value_type, {i(of.value_size), i(of.n_cells), i(of.n_groups), i(of.n_streams)}, values.data());
    ggml_tensor q =
        tensor(GGML_TYPE_F32, {i(of.key_size), i(of.n_rows), i(of.n_heads), i(of.n_streams)}, own.queries.data());
    ggml_tensor mask = tensor(GGML_TYPE_F16, {i(of.n_cells), i(of.n_rows), 1, i(of.n_streams)}, own.mask.data());
    ggml_tensor sinks = tensor(GGML_TYPE_F32, {i(of.n_heads)}, own.sinks.data());
    ggml_tensor written = cache;
    k.view_src = &written;
    q.data = own.queries.data() + first * of.key_size;
    mask.data = own.mask.data() + first * of.n_cells;
    q.ne[1] = mask.ne[1] = i(n);
    std::vector<float> out(of.n_streams * n * of.n_heads * of.value_size, NAN);
    ggml_tensor op = tensor(GGML_TYPE_F32, {i(of.value_size), i(of.n_heads), i(n), i(of.n_streams)}, out.data());
    op.op = GGML_OP_FLASH_ATTN_EXT;
    std::memcpy(op.op_params, &of.scale, sizeof(float));
    std::memcpy(op.op_params + 1, &of.most_bias, sizeof(float));
    std::memcpy(op.op_params + 2, &of.cap, sizeof(float));
    op.src[0] = &q;
    op.src[1] = &k;
    op.src[2] = &v;
    op.src[3] = &mask;
    op.src[4] = of.has_sinks ? &sinks : nullptr;
    check(CpuAttention::can_compute(&op), "it can be computed");
    size_t size = 0;
    attention.work_size(n_threads, &op, size);
    std::vector<char> work(size);
    Pool pool(n_threads);
    std::vector<std::thread> threads;
    for (int t = 0; t < n_threads; t++) {
        threads.emplace_back([&, t] {
            ggml_internal::ComputeParams params = {
                t, n_threads, size, work.data(), reinterpret_cast<ggml_threadpool *>(&pool), false};
            attention.compute_forward(&params, &op);
        });
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
    return out;
}

bool are_same(const float * a, const float * b, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (!(a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i])))) {
            return false;
        }
    }
    return true;
}

// Of ALiBi: 2^(-8 / n), 2^(-16 / n), ... of n heads, a power of two; more heads have those of 2 n heads that lie
// between.
double slope(const Case & of, size_t head) {
    if (of.most_bias == 0.0f) {
        return 1.0;
    }
    const double n = std::exp2(std::floor(std::log2(static_cast<double>(of.n_heads)))), h = static_cast<double>(head);
    const double most = static_cast<double>(of.most_bias);
    return h < n ? std::exp2(-most / n * (h + 1.0)) : std::exp2(-most / (2.0 * n) * (2.0 * (h - n) + 1.0));
}

// A head of a row, [value_size], against sums of doubles.
bool is_right(const Case & of, size_t stream, size_t r, size_t head, const float * out) {
    const size_t group = stream * of.n_groups + head / of.n_each;
    const float * query = &of.queries[((stream * of.n_heads + head) * of.n_rows + r) * of.key_size];
    std::vector<double> weights(of.n_cells, 0.0);
    double most = of.has_sinks ? static_cast<double>(of.sinks[head]) : -INFINITY;
    const auto number = [](uint16_t half) { return static_cast<double>(ggml_fp16_to_fp32(half)); };
    for (size_t c = 0; c < of.n_cells; c++) {
        weights[c] = -INFINITY;
        if (of.sees(stream, r, c)) {
            double score = 0.0;
            for (size_t i = 0; i < of.key_size; i++) {
                score += static_cast<double>(query[i]) * number(of.keys[(group * of.n_cells + c) * of.key_size + i]);
            }
            score *= static_cast<double>(of.scale);
            const double cap = static_cast<double>(of.cap);
            score = cap != 0.0 ? cap * std::tanh(score / cap) : score;
            weights[c] = score + slope(of, head) * number(of.mask[(stream * of.n_rows + r) * of.n_cells + c]);
            most = std::max(most, weights[c]);
        }
    }
    double sum = of.has_sinks ? std::exp(static_cast<double>(of.sinks[head]) - most) : 0.0;
    for (double & weight : weights) {
        weight = std::isinf(weight) ? 0.0 : std::exp(weight - most);
        sum += weight;
    }
    for (size_t i = 0; i < of.value_size; i++) {
        double right = 0.0, magnitude = 0.0;
        for (size_t c = 0; c < of.n_cells; c++) {
            if (weights[c] > 0.0) {
                const double term = weights[c] * number(of.values[(group * of.n_cells + c) * of.value_size + i]);
                right += term;
                magnitude += std::abs(term);
            }
        }
        const double expected = sum > 0.0 ? right / sum : 0.0, tolerance = sum > 0.0 ? 2e-5 * magnitude / sum : 0.0;
        if (!(std::abs(static_cast<double>(out[i]) - expected) <= tolerance + 1e-12)) {
            return false;
        }
    }
    return true;
}

void test_case(uint32_t seed, bool is_large) {
    Random random(seed);
    const std::string what = "seed " + std::to_string(seed) + ": ";
    Case of = random_case(random, is_large);
    // What is not finite in the last cell reaches the rows that see it, and no others.
    const bool is_key = random.one_in(2);
    const bool is_odd = random.one_in(3) && (is_key ? of.key_type : of.value_type) == GGML_TYPE_F16;
    if (is_odd) {
        std::vector<uint16_t> & numbers = is_key ? of.keys : of.values;
        const size_t size = numbers.size() / (of.n_streams * of.n_groups * of.n_cells);
        for (size_t group = 0; group < of.n_streams * of.n_groups; group++) {
            numbers[(group * of.n_cells + of.n_cells - 1) * size + random.between(0, size - 1)] = infinity;
        }
    }
    CpuAttention attention;
    attention.barrier = wait;
    attention.set_chunk = set_chunk;
    attention.add_chunk = add_chunk;
    ggml_tensor cache = {};
    cache.buffer = reinterpret_cast<ggml_backend_buffer_t>(&cache); // an address is all that counts
    if (of.n_streams == 1 && random.one_in(2)) {
        for (int time = 0; time < 6; time++) {
            std::vector<int64_t> cells(random.between(1, of.n_cells));
            std::generate(cells.begin(), cells.end(),
                          [&] { return static_cast<int64_t>(random.between(0, of.n_cells - 1)); });
            const ggml_tensor ids = tensor(GGML_TYPE_I64, {static_cast<int64_t>(cells.size())}, cells.data());
            attention.order.write(cache.buffer, &ids, of.n_cells);
        }
    }
    const std::vector<float> together =
        compute(attention, of, cache, 0, of.n_rows, static_cast<int>(random.between(1, 4)));
    const size_t row_size = of.n_heads * of.value_size;
    for (size_t r = 0; r < of.n_rows; r += 1 + of.n_rows / 8) {
        const std::vector<float> alone = compute(attention, of, cache, r, 1, static_cast<int>(random.between(1, 2)));
        for (size_t stream = 0; stream < of.n_streams; stream++) {
            const float * own = alone.data() + stream * row_size;
            check(are_same(own, together.data() + (stream * of.n_rows + r) * row_size, row_size),
                  what + "a row alone and among others");
            for (size_t head = 0; head < of.n_heads; head += is_large ? 7 : 1) {
                check((is_odd && of.sees(stream, r, of.n_cells - 1)) ||
                          is_right(of, stream, r, head, own + head * of.value_size),
                      what + "a row is right");
            }
        }
    }
}

void write(CellOrder & order, const void * cache, std::vector<int64_t> cells, size_t n_cells) {
    const ggml_tensor ids = tensor(GGML_TYPE_I64, {static_cast<int64_t>(cells.size())}, cells.data());
    order.write(cache, &ids, n_cells);
}

void test_order() {
    const int a = 0, b = 0; // two caches
    CellOrder order;
    const auto is = [&](const void * cache, std::vector<int32_t> right) {
        std::vector<int32_t> out(right.size());
        order.read(cache, out.size(), out.data());
        return out == right;
    };
    check(is(&a, {0, 1, 2, 3, 4}), "an unknown cache, as it lies");
    write(order, &a, {3, 1}, 5);
    check(is(&a, {0, 2, 4, 3, 1}), "written cells last");
    write(order, &a, {3, 1}, 5);
    check(is(&a, {0, 2, 4, 3, 1}), "the next layer");
    write(order, &a, {3, 0, 3}, 5);
    check(is(&a, {2, 4, 1, 0, 3}), "written again");
    check(is(&a, {2, 1, 0, 3}), "a part");
    order.restore(&a, 1, 3, 5);
    check(is(&a, {4, 0, 1, 2, 3}), "restored cells as they were saved");
    order.restore(&b, 1, 3, 5);
    check(is(&b, {0, 1, 2, 3, 4}), "of a cache that nobody knows");
    for (int64_t i = 0; i < 1000; i++) {
        write(order, &a, {i % 3, 4 - i % 2}, 5);
    }
    check(is(&a, {1, 2, 4, 0, 3}), "after many");
    write(order, &b, {1}, 7);
    check(order.n_caches() == 2, "two caches");
    order.forget(&a);
    check(order.n_caches() == 1 && is(&a, {0, 1, 2, 3, 4}) && is(&b, {0, 2, 3, 4, 5, 6, 1}), "one of them is gone");
}

#ifndef _WIN32
// A fork can use what another thread was using when it was made.
void test_forks() {
    const int a = 0;
    CellOrder order;
    write(order, &a, {3, 1}, 4000);
    std::atomic<bool> is_over{false};
    std::vector<int32_t> out(4000);
    std::thread other([&] {
        while (!is_over) {
            order.read(&a, out.size(), out.data());
        }
    });
    bool is_right = true;
    for (int i = 0; i < 50; i++) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(5); // ends it
            int32_t cells[4];
            order.read(&a, 4, cells);
            _exit(cells[3] == 1 ? 0 : 1);
        }
        int status = -1;
        waitpid(child, &status, 0);
        is_right = is_right && status == 0;
        if (!is_right) {
            break;
        }
    }
    is_over = true;
    other.join();
    check(is_right, "the order of cells in a fork");
}
#endif

} // namespace

// OpenMP may compute with fewer threads than ggml planned for, in the same work memory.
void test_fewer_threads() {
    for (const int64_t n_cells : {4096, 30464, 67584, 101376}) {
        ggml_tensor k = tensor(GGML_TYPE_F16, {8, n_cells, 1, 1}, nullptr), v = k;
        ggml_tensor q = tensor(GGML_TYPE_F32, {8, 48, 8, 1}, nullptr);
        ggml_tensor op = tensor(GGML_TYPE_F32, {8, 8, 48, 1}, nullptr);
        op.src[0] = &q;
        op.src[1] = &k;
        op.src[2] = &v;
        size_t before = 0;
        for (int n_threads = 1; n_threads <= 16; n_threads++) {
            size_t size = 0;
            CpuAttention().work_size(n_threads, &op, size);
            check(size >= before, "work memory for " + std::to_string(n_threads) + " threads and for fewer");
            before = size;
        }
    }
}

int main() {
    if (kernels::attention() == nullptr) {
        std::printf("skipped: no instruction set\n");
        return 0;
    }
    test_order();
    test_fewer_threads();
#ifndef _WIN32
    test_forks();
#endif
    const char * wanted = std::getenv("PYFLY_FUZZ_CASES");
    const int n_cases = wanted != nullptr ? std::atoi(wanted) : 60;
    for (int i = 0; i < n_cases; i++) {
        test_case(static_cast<uint32_t>(i), i % 30 == 0);
    }
    std::printf("%s\n", n_failed == 0 ? "ok" : "failed");
    return n_failed == 0 ? 0 : 1;
}
