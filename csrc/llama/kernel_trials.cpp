#include "kernel_trials.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "error.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "packed_buffers.h"

namespace pyfly {

namespace {

void require(bool is_done) {
    if (!is_done) {
        throw Error(PYFLY_STATUS_NATIVE, "ggml could not compute a graph to try the kernels");
    }
}

template <class T, void (*free)(T *)> struct Free {
    void operator()(T * p) const { free(p); }
};
using Context = std::unique_ptr<ggml_context, Free<ggml_context, ggml_free>>;
using Backend = std::unique_ptr<ggml_backend, Free<ggml_backend, ggml_backend_free>>;
using Buffer = std::unique_ptr<ggml_backend_buffer, Free<ggml_backend_buffer, ggml_backend_buffer_free>>;

// Weights in one buffer, everything else in another.
class Graph {
  public:
    Graph()
        : weights_(ggml_init({4 * ggml_tensor_overhead(), nullptr, true})),
          rest_(ggml_init({16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true})) {
        require(weights_ && rest_);
    }

    ggml_context * weights() const { return weights_.get(); }
    ggml_context * rest() const { return rest_.get(); }

    // Makes room for all tensors; `matrix` is of weights().
    void allocate(const ggml_tensor * matrix, bool is_ours) {
        const PackedBuffers::Taking taking(PackedBuffers::attention);
        const ggml_backend_buffer_type_t type = is_ours ? PackedBuffers::type() : PackedBuffers::stock_type(matrix);
        weight_buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(weights(), type));
        rest_buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(rest(), ggml_backend_cpu_buffer_type()));
        require(weight_buffer_ && rest_buffer_);
    }

    // Computes it n_repeats times: the shortest time, microseconds.
    double compute(ggml_tensor * result, const TrialSetup & setup) const {
        const Backend backend(ggml_backend_cpu_init());
        require(backend != nullptr);
        ggml_backend_cpu_set_n_threads(backend.get(), setup.n_threads);
        ggml_cgraph * graph = ggml_new_graph(rest());
        ggml_build_forward_expand(graph, result);
        require(ggml_backend_supports_op(backend.get(), result));
        double shortest = std::numeric_limits<double>::infinity();
        for (int32_t i = 0; i < setup.n_repeats; i++) {
            const auto begin = std::chrono::steady_clock::now();
            require(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS);
            const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
            shortest = std::min(shortest, time.count());
        }
        return shortest;
    }

  private:
    Context weights_, rest_;
    Buffer weight_buffer_, rest_buffer_;
};

std::vector<float> random_numbers(std::mt19937 & random, int64_t n) {
    std::vector<float> values(static_cast<size_t>(n));
    for (float & value : values) {
        value = static_cast<float>(random() % 2001) / 1000.0f - 1.0f;
    }
    return values;
}

template <class T> void write(ggml_tensor * tensor, const std::vector<T> & values) {
    ggml_backend_tensor_set(tensor, values.data(), 0, values.size() * sizeof(T));
}

std::vector<float> read(const ggml_tensor * tensor) {
    std::vector<float> values(static_cast<size_t>(ggml_nelements(tensor)));
    ggml_backend_tensor_get(tensor, values.data(), 0, values.size() * sizeof(float));
    return values;
}

// A sum and that of its magnitudes.
struct Sum {
    double value = 0.0, magnitude = 0.0;

    void add(double term) {
        value += term;
        magnitude += std::abs(term);
    }

    double error_of(double result) const {
        const double error = std::abs(result - value) / std::max(magnitude, 1e-30);
        return std::isfinite(error) ? error : std::numeric_limits<double>::infinity();
    }
};

constexpr int64_t n_in = 512, n_own = 64; // of a matrix: inputs, and rows of weights that are not copies of others

// A matrix of this type with n_out rows of weights.
struct Matrix {
    ggml_type type;
    int64_t n_out;
    std::vector<uint8_t> quantised; // [n_out] rows of 512
    std::vector<float> right;       // what its own rows stand for, [n_own][512]

    Matrix(kernels::WeightType kind, int64_t n, std::mt19937 & random)
        : type(static_cast<ggml_type>(kind)), n_out(n),
          quantised(ggml_row_size(type, n_in) * static_cast<size_t>(n_own)), right(n_in * n_own) {
        const std::vector<float> values = random_numbers(random, n_in * n_own);
        const std::vector<float> importance(n_in, 1.0f);
        ggml_quantize_chunk(type, values.data(), quantised.data(), 0, n_own, n_in, importance.data());
        if (const ggml_to_float_t to_float = ggml_get_type_traits(type)->to_float; to_float != nullptr) {
            to_float(quantised.data(), right.data(), n_in * n_own);
        } else { // F32
            right = values;
        }
        const std::vector<uint8_t> own = quantised;
        for (int64_t copy = 1; copy < n_out / n_own; copy++) {
            quantised.insert(quantised.end(), own.begin(), own.end());
        }
    }

    // Its products with rows [setup.n_rows][512]: [setup.n_rows][n_out]. `us`: receives the shortest time,
    // microseconds; may be null.
    std::vector<float> multiplied(const std::vector<float> & x, const TrialSetup & setup, double * us) const {
        Graph graph;
        ggml_tensor * weights = ggml_new_tensor_2d(graph.weights(), type, n_in, n_out);
        ggml_tensor * rows = ggml_new_tensor_2d(graph.rest(), GGML_TYPE_F32, n_in, setup.n_rows);
        ggml_tensor * product = ggml_mul_mat(graph.rest(), weights, rows);
        graph.allocate(weights, setup.is_ours);
        write(weights, quantised);
        write(rows, x);
        const double shortest = graph.compute(product, setup);
        if (us != nullptr) {
            *us = shortest;
        }
        return read(product);
    }
};

} // namespace

KernelTrial try_product(kernels::WeightType type, int64_t n_out, const TrialSetup & setup) {
    std::mt19937 random(1);
    const Matrix matrix(type, n_out, random);
    const std::vector<float> x = random_numbers(random, n_in * setup.n_rows);
    KernelTrial trial = {0.0, 0.0};
    const std::vector<float> out = matrix.multiplied(x, setup, &trial.us);
    for (size_t r = 0; r < static_cast<size_t>(setup.n_rows); r++) {
        for (size_t o = 0; o < static_cast<size_t>(n_own); o++) {
            Sum sum;
            for (size_t i = 0; i < n_in; i++) {
                sum.add(static_cast<double>(matrix.right[o * n_in + i]) * x[r * n_in + i]);
            }
            for (size_t copy = o; copy < static_cast<size_t>(n_out); copy += n_own) {
                trial.error = std::max(trial.error, sum.error_of(out[r * static_cast<size_t>(n_out) + copy]));
            }
        }
    }
    return trial;
}

uint32_t batches_with_other_bits(kernels::WeightType type, int64_t n_out, int32_t n_threads, bool is_ours) {
    constexpr int32_t n_most = 32;
    std::mt19937 random(1);
    const Matrix matrix(type, n_out, random);
    const std::vector<float> x = random_numbers(random, n_in * n_most);
    const auto products = [&](int32_t first, int32_t n_rows) {
        const std::vector<float> rows(x.begin() + first * n_in, x.begin() + (first + n_rows) * n_in);
        return matrix.multiplied(rows, {n_rows, n_threads, 1, is_ours}, nullptr);
    };
    std::vector<float> alone;
    for (int32_t r = 0; r < n_most; r++) {
        const std::vector<float> row = products(r, 1);
        alone.insert(alone.end(), row.begin(), row.end());
    }
    uint32_t others = 0;
    for (int32_t n = 1; n <= n_most; n++) {
        const std::vector<float> rows = products(0, n);
        if (std::memcmp(rows.data(), alone.data(), rows.size() * sizeof(float)) != 0) {
            others |= uint32_t{1} << (n - 1);
        }
    }
    return others;
}

KernelTrial try_attention(int64_t n_cells, const TrialSetup & setup) {
    constexpr int64_t size = 128, n_heads = 8, n_groups = 2, n_hidden = 32;
    const float scale = 1.0f / std::sqrt(static_cast<float>(size));
    const int64_t n_rows = setup.n_rows;
    std::mt19937 random(1);
    const auto halves = [](const std::vector<float> & values) {
        std::vector<ggml_fp16_t> out(values.size());
        ggml_fp32_to_fp16_row(values.data(), out.data(), static_cast<int64_t>(values.size()));
        return out;
    };
    const std::vector<ggml_fp16_t> matrix = halves(random_numbers(random, n_hidden * size * n_heads)),
                                   keys = halves(random_numbers(random, size * n_cells * n_groups)),
                                   values = halves(random_numbers(random, size * n_cells * n_groups));
    std::vector<float> hidden(static_cast<size_t>(n_cells * n_rows), 0.0f);
    for (int64_t r = 0; r < n_rows; r++) {
        std::fill_n(hidden.begin() + (r + 1) * n_cells - (n_rows - 1 - r), n_rows - 1 - r, -INFINITY);
    }

    // Queries are products of weights: by these it is known whose attention it is.
    Graph graph;
    ggml_tensor * weights = ggml_new_tensor_2d(graph.weights(), GGML_TYPE_F16, n_hidden, size * n_heads);
    ggml_tensor * x = ggml_new_tensor_2d(graph.rest(), GGML_TYPE_F32, n_hidden, n_rows);
    ggml_tensor * k = ggml_new_tensor_3d(graph.rest(), GGML_TYPE_F16, size, n_cells, n_groups);
    ggml_tensor * v = ggml_new_tensor_3d(graph.rest(), GGML_TYPE_F16, size, n_cells, n_groups);
    ggml_tensor * mask = ggml_new_tensor_2d(graph.rest(), GGML_TYPE_F16, n_cells, n_rows);
    ggml_tensor * queries = ggml_mul_mat(graph.rest(), weights, x);
    ggml_tensor * q = ggml_reshape_3d(graph.rest(), queries, size, n_heads, n_rows);
    ggml_tensor * result =
        ggml_flash_attn_ext(graph.rest(), ggml_permute(graph.rest(), q, 0, 2, 1, 3), k, v, mask, scale, 0.0f, 0.0f);
    graph.allocate(weights, setup.is_ours);
    write(weights, matrix);
    write(x, random_numbers(random, n_hidden * n_rows));
    write(k, keys);
    write(v, values);
    write(mask, halves(hidden));
    KernelTrial trial = {0.0, graph.compute(result, setup)};

    const std::vector<float> of_queries = read(queries), out = read(result);
    std::vector<double> shares(static_cast<size_t>(n_cells));
    const auto number = [](const std::vector<ggml_fp16_t> & of, int64_t i) {
        return static_cast<double>(ggml_fp16_to_fp32(of[static_cast<size_t>(i)]));
    };
    for (int64_t r = 0; r < n_rows; r++) {
        for (int64_t head = 0; head < n_heads; head++) {
            const int64_t at = (r * n_heads + head) * size, first = head / (n_heads / n_groups) * n_cells;
            const int64_t n_seen = n_cells - (n_rows - 1 - r);
            double total = 0.0;
            for (int64_t c = 0; c < n_seen; c++) {
                double score = 0.0;
                for (int64_t i = 0; i < size; i++) {
                    score += of_queries[static_cast<size_t>(at + i)] * number(keys, (first + c) * size + i);
                }
                total += shares[static_cast<size_t>(c)] = std::exp(score * static_cast<double>(scale));
            }
            for (int64_t i = 0; i < size; i++) {
                Sum sum;
                for (int64_t c = 0; c < n_seen; c++) {
                    sum.add(shares[static_cast<size_t>(c)] / total * number(values, (first + c) * size + i));
                }
                trial.error = std::max(trial.error, sum.error_of(out[static_cast<size_t>(at + i)]));
            }
        }
    }
    return trial;
}

} // namespace pyfly
