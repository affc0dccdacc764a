// Packed buffers in ggml's own graphs and threads: products and attention are right, weights come back, and a cache is
// watched as long as it is there.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "check.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "kernels/products.h"
#include "llama/cell_order.h"
#include "llama/kernel_trials.h"
#include "llama/packed_buffers.h"

#ifdef __linux__
#include "mapped_file.h"
#endif

using namespace pyfly;

namespace {

struct FreeContext {
    void operator()(ggml_context * context) const { ggml_free(context); }
};
struct FreeBuffer {
    void operator()(ggml_backend_buffer * buffer) const { ggml_backend_buffer_free(buffer); }
};
using Context = std::unique_ptr<ggml_context, FreeContext>;
using Buffer = std::unique_ptr<ggml_backend_buffer, FreeBuffer>;

Context make_context() {
    return Context(ggml_init({16 * ggml_tensor_overhead(), nullptr, true}));
}

void test_trials() {
    for (int32_t type = 0; type < 64; type++) {
        const auto kind = static_cast<kernels::WeightType>(type);
        if (kernels::products(kind, 1) == nullptr) {
            continue;
        }
        for (const int32_t n_rows : {1, 5, 18, 150}) {
            check(try_product(kind, 192, {n_rows, 3, 1, true}).error <= 2e-3,
                  "a product of " + std::string(ggml_type_name(static_cast<ggml_type>(type))));
        }
    }
    for (const int32_t n_rows : {1, 5, 40}) {
        check(try_attention(100, {n_rows, 3, 1, true}).error <= 2e-6, "attention");
    }
}

// Two matrices whose last panels are not full, as a whole and in pieces.
void test_weights_come_back() {
    const Context context = make_context();
    ggml_tensor * weights = ggml_new_tensor_3d(context.get(), GGML_TYPE_Q8_0, 64, 21, 2);
    const PackedBuffers::Taking taking(PackedBuffers::attention | PackedBuffers::locked);
    const Buffer buffer(ggml_backend_alloc_ctx_tensors_from_buft(context.get(), PackedBuffers::type()));
    std::vector<uint8_t> bytes(ggml_nbytes(weights));
    for (size_t i = 0; i < bytes.size(); i++) {
        bytes[i] = static_cast<uint8_t>(i * 37 + i / 251);
    }
    ggml_backend_tensor_set(weights, bytes.data(), 0, bytes.size());
    std::vector<uint8_t> read(bytes.size());
    ggml_backend_tensor_get(weights, read.data(), 0, read.size());
    check(read == bytes, "all weights come back");
    for (size_t offset = 0; offset < bytes.size(); offset += 101) {
        std::vector<uint8_t> part(std::min<size_t>(137, bytes.size() - offset));
        ggml_backend_tensor_get(weights, part.data(), offset, part.size());
        check(std::memcmp(part.data(), bytes.data() + offset, part.size()) == 0, "a part of them comes back");
    }
}

#ifdef __linux__
// What was packed from a mapped file is not kept as a part of it, too.
void test_pages_are_let_go() {
    const Context context = make_context();
    ggml_tensor * weights = ggml_new_tensor_2d(context.get(), GGML_TYPE_Q8_0, 64, 2048);
    const PackedBuffers::Taking taking(0);
    const Buffer buffer(ggml_backend_alloc_ctx_tensors_from_buft(context.get(), PackedBuffers::type()));
    const size_t n_pages = ggml_nbytes(weights) / page;
    const MappedFile file((n_pages + 1) * page, PROT_READ, MAP_SHARED);
    ggml_backend_tensor_set(weights, file.bytes, 0, ggml_nbytes(weights));
    check(n_pages > 1 && n_present(file.bytes, n_pages) == 0, "pages of the file are let go");
    std::vector<uint8_t> read(ggml_nbytes(weights));
    ggml_backend_tensor_get(weights, read.data(), 0, read.size());
    check(std::memcmp(read.data(), file.bytes, read.size()) == 0, "their weights are there");
}
#endif

// Rows whose third dimension is shared by two matrices, or, where a graph gives the weights another shape, the fourth.
void test_several_matrices(bool is_reshaped) {
    const Context weights_context = make_context();
    const PackedBuffers::Taking taking(0);
    ggml_tensor * weights = ggml_new_tensor_3d(weights_context.get(), GGML_TYPE_F16, 64, 21, 2);
    const Buffer weights_buffer(ggml_backend_alloc_ctx_tensors_from_buft(weights_context.get(), PackedBuffers::type()));
    std::vector<ggml_fp16_t> halves(64 * 21 * 2);
    for (size_t i = 0; i < halves.size(); i++) {
        halves[i] = ggml_fp32_to_fp16(static_cast<float>(i * 7 % 65) / 32.0f - 1.0f);
    }
    ggml_backend_tensor_set(weights, halves.data(), 0, ggml_nbytes(weights));
    const Context context(ggml_init({16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true}));
    ggml_tensor * x = ggml_new_tensor_4d(context.get(), GGML_TYPE_F32, 64, 6, 4, is_reshaped ? 4 : 3);
    ggml_tensor * shaped = is_reshaped ? ggml_reshape_4d(context.get(), weights, 64, 21, 1, 2) : weights;
    ggml_tensor * product = ggml_mul_mat(context.get(), shaped, x);
    check(PackedBuffers::computes(product), "matrices are ours before a graph has a place");
    const Buffer buffer(ggml_backend_alloc_ctx_tensors_from_buft(context.get(), ggml_backend_cpu_buffer_type()));
    std::vector<float> rows(static_cast<size_t>(ggml_nelements(x)));
    for (size_t i = 0; i < rows.size(); i++) {
        rows[i] = static_cast<float>(i * 11 % 97) / 48.0f - 1.0f;
    }
    ggml_backend_tensor_set(x, rows.data(), 0, ggml_nbytes(x));
    ggml_cgraph * graph = ggml_new_graph(context.get());
    ggml_build_forward_expand(graph, product);
    ggml_backend_t backend = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(backend, 3);
    check(ggml_backend_supports_op(backend, product) && PackedBuffers::computes(product), "matrices are multiplied");
    check(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS, "a graph is computed");
    ggml_backend_free(backend);
    std::vector<float> out(static_cast<size_t>(ggml_nelements(product)));
    ggml_backend_tensor_get(product, out.data(), 0, ggml_nbytes(product));
    for (size_t r = 0; r < rows.size() / 64; r++) {
        const size_t matrix = is_reshaped ? r / (6 * 4) / 2 : r / 6 % 4 / 2;
        for (size_t o = 0; o < 21; o++) {
            double right = 0.0, magnitude = 0.0;
            for (size_t i = 0; i < 64; i++) {
                const double term = static_cast<double>(ggml_fp16_to_fp32(halves[(matrix * 21 + o) * 64 + i])) *
                                    static_cast<double>(rows[r * 64 + i]);
                right += term;
                magnitude += std::abs(term);
            }
            check(std::abs(static_cast<double>(out[r * 21 + o]) - right) <= 1e-6 * magnitude, "a product of matrices");
        }
    }
}

// What experts make of rows[n_tokens][256]: [n_tokens][2][21]. A token goes to the expert that its first number
// names, and to the last one.
std::vector<float> of_experts(ggml_tensor * weights, const float * rows, int64_t n_tokens) {
    const Context context(ggml_init({16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true}));
    ggml_tensor * x = ggml_new_tensor_3d(context.get(), GGML_TYPE_F32, 256, 1, n_tokens);
    ggml_tensor * ids = ggml_new_tensor_2d(context.get(), GGML_TYPE_I32, 2, n_tokens);
    ggml_tensor * product = ggml_mul_mat_id(context.get(), weights, x, ids);
    const Buffer buffer(ggml_backend_alloc_ctx_tensors_from_buft(context.get(), ggml_backend_cpu_buffer_type()));
    ggml_backend_tensor_set(x, rows, 0, ggml_nbytes(x));
    for (int32_t t = 0; t < n_tokens; t++) {
        const int32_t own[2] = {static_cast<int32_t>(rows[t * 256]), 3};
        ggml_backend_tensor_set(ids, own, static_cast<size_t>(t) * sizeof(own), sizeof(own));
    }
    ggml_cgraph * graph = ggml_new_graph(context.get());
    ggml_build_forward_expand(graph, product);
    ggml_backend_t backend = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(backend, 3);
    check(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS, "a graph is computed");
    ggml_backend_free(backend);
    std::vector<float> out(static_cast<size_t>(ggml_nelements(product)));
    ggml_backend_tensor_get(product, out.data(), 0, ggml_nbytes(product));
    return out;
}

// Experts with few rows and with many, whose kernels differ, give the bits of each token alone.
void test_experts() {
    constexpr int64_t n_tokens = 70;
    const Context context = make_context();
    const PackedBuffers::Taking taking(0);
    for (const ggml_type type : {GGML_TYPE_Q4_K, GGML_TYPE_Q8_0}) {
        ggml_tensor * weights = ggml_new_tensor_3d(context.get(), type, 256, 21, 4);
        const Buffer buffer(ggml_backend_alloc_ctx_tensors_from_buft(context.get(), PackedBuffers::type()));
        std::vector<float> values(256 * 21 * 4), rows(256 * n_tokens);
        for (size_t i = 0; i < values.size(); i++) {
            values[i] = static_cast<float>(i * 7 % 65) / 32.0f - 1.0f;
        }
        for (size_t i = 0; i < rows.size(); i++) { // the first of a token names its first expert
            rows[i] = i % 256 == 0 ? static_cast<float>(i / 256 % 3) : static_cast<float>(i * 11 % 97) / 48.0f - 1.0f;
        }
        std::vector<uint8_t> bytes(ggml_nbytes(weights));
        ggml_quantize_chunk(type, values.data(), bytes.data(), 0, 21 * 4, 256, nullptr);
        ggml_backend_tensor_set(weights, bytes.data(), 0, bytes.size());
        const std::vector<float> together = of_experts(weights, rows.data(), n_tokens);
        for (size_t t = 0; t < n_tokens; t++) {
            const std::vector<float> alone = of_experts(weights, rows.data() + t * 256, 1);
            check(std::memcmp(alone.data(), together.data() + t * alone.size(), alone.size() * sizeof(float)) == 0,
                  "experts give a token alone the same bits");
        }
    }
}

// Contexts that come and go leave nothing, and a state that is restored has its own order.
void test_caches() {
    CellOrder order;
    CellWriter writer(order);
    constexpr int64_t n_cells = 8;
    for (int i = 0; i < 20; i++) {
        const Context context = make_context();
        ggml_tensor * cache = ggml_new_tensor_2d(context.get(), GGML_TYPE_F16, 16, n_cells);
        ggml_tensor * rows = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, 16, 3);
        ggml_tensor * cells = ggml_new_tensor_1d(context.get(), GGML_TYPE_I64, 3);
        const Buffer buffer(ggml_backend_alloc_ctx_tensors_from_buft(context.get(), ggml_backend_cpu_buffer_type()));
        ggml_tensor * op = ggml_set_rows(context.get(), cache, rows, cells);
        op->data = cache->data;
        const std::vector<int64_t> written = {5, 2, 7};
        std::memcpy(cells->data, written.data(), ggml_nbytes(cells));
        check(CellWriter::is_write(op), "a write");
        ggml_internal::ComputeParams params = {0, 1, 0, nullptr, nullptr, false};
        check(!writer.compute_forward(&params, op), "llama.cpp does it");
        check(order.n_caches() == 1, "caches that are gone are forgotten");
        std::vector<int32_t> now(n_cells);
        order.read(cache->buffer, now.size(), now.data());
        check(now == std::vector<int32_t>{0, 1, 3, 4, 6, 5, 2, 7}, "the order of writing");

        const std::vector<uint16_t> state(16 * 4, 0x3C00);
        ggml_backend_tensor_set(cache, state.data(), 4 * 32, state.size() * 2); // cells 4..7
        order.read(cache->buffer, now.size(), now.data());
        check(now == std::vector<int32_t>{0, 1, 3, 2, 4, 5, 6, 7}, "the order of a restored state");
        check(std::memcmp(static_cast<uint8_t *>(cache->data) + 4 * 32, state.data(), state.size() * 2) == 0,
              "what is restored is there");
    }
    check(order.n_caches() == 0, "nothing is left");
}

} // namespace

int main() {
    const std::string why_not = PackedBuffers::enable();
    if (!why_not.empty()) {
        std::printf("skipped: %s\n", why_not.c_str());
        return 0;
    }
    test_trials();
    test_weights_come_back();
#ifdef __linux__
    test_pages_are_let_go();
#endif
    test_several_matrices(false);
    test_several_matrices(true);
    test_experts();
    test_caches();
    std::printf("%s\n", n_failed == 0 ? "ok" : "failed");
    return n_failed == 0 ? 0 : 1;
}
