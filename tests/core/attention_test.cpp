// The steps of attention against sums of doubles, and the same bits whatever is computed beside them and on every
// instruction set: that of PYFLY_ISA, or the best one of this machine.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "bits.h"
#include "check.h"
#include "kernels/attention.h"

using namespace pyfly::kernels;

namespace {

// k / 64 for -64 <= k <= 64 has eleven bits, so it is a half: the sign, an exponent and the bits behind the first.
uint16_t half_of(int k) {
    if (k == 0) {
        return 0;
    }
    const int magnitude = std::abs(k);
    int exponent = 0;
    while (magnitude >> (exponent + 1) != 0) {
        exponent++;
    }
    return static_cast<uint16_t>((k < 0 ? 0x8000 : 0) | (exponent - 6 + 15) << 10 |
                                 ((magnitude << (10 - exponent)) & 1023));
}

struct Case {
    int size, n_cells, n_queries;
    size_t stride; // numbers between the beginnings of two cells
    std::vector<double> cells;
    std::vector<const void *> rows;
    std::vector<uint16_t> halves;
    std::vector<float> queries, weights; // [n_queries][size], [n_queries][tile]

    Case(int of_size, int of_cells, int of_queries, std::mt19937 & random)
        : size(of_size), n_cells(of_cells), n_queries(of_queries), stride(static_cast<size_t>(of_size) + 24) {
        halves.resize(stride * static_cast<size_t>(n_cells));
        cells.resize(halves.size());
        for (size_t i = 0; i < halves.size(); i++) {
            const int k = static_cast<int>(random() % 129) - 64;
            halves[i] = half_of(k);
            cells[i] = k / 64.0;
        }
        for (int c = 0; c < n_cells; c++) {
            rows.push_back(halves.data() + static_cast<size_t>(c) * stride);
        }
        std::normal_distribution<float> normal;
        queries.resize(static_cast<size_t>(n_queries * size));
        weights.resize(static_cast<size_t>(n_queries * tile));
        for (std::vector<float> * numbers : {&queries, &weights}) {
            for (float & number : *numbers) {
                number = normal(random);
            }
        }
    }

    Cells all() const { return {rows.data(), n_cells, CellType::f16}; }
    double cell(int c, int i) const { return cells[static_cast<size_t>(c) * stride + static_cast<size_t>(i)]; }
};

// Pointers to rows of `width` numbers.
template <class T> std::vector<T *> rows_of(T * first, int n, int width) {
    std::vector<T *> rows;
    for (int r = 0; r < n; r++) {
        rows.push_back(first + r * width);
    }
    return rows;
}

void test_sums(const Case & of) {
    const Attention & kernel = *attention();
    const std::string what = std::to_string(of.size) + " x " + std::to_string(of.n_cells) + " cells, " +
                             std::to_string(of.n_queries) + " queries";
    std::vector<float> converted(static_cast<size_t>(tile * of.size));
    std::vector<float> scores(static_cast<size_t>(of.n_queries * tile)), alone(scores.size());
    const auto queries = rows_of(of.queries.data(), of.n_queries, of.size);
    const auto weights = rows_of(of.weights.data(), of.n_queries, tile);
    kernel.dot_products(of.all(), of.size, queries.data(), of.n_queries,
                        rows_of(scores.data(), of.n_queries, tile).data(), converted.data());
    std::vector<float> sums(static_cast<size_t>(of.n_queries * of.size), 0.5f), alone_sums(sums);
    kernel.add_weighted(of.all(), of.size, weights.data(), of.n_queries,
                        rows_of(sums.data(), of.n_queries, of.size).data(), converted.data());
    for (int q = 0; q < of.n_queries; q++) {
        float * own = alone.data() + q * tile;
        float * own_sums = alone_sums.data() + q * of.size;
        kernel.dot_products(of.all(), of.size, queries.data() + q, 1, &own, converted.data());
        kernel.add_weighted(of.all(), of.size, weights.data() + q, 1, &own_sums, converted.data());
        for (int c = 0; c < of.n_cells; c++) {
            double right = 0.0, magnitude = 0.0;
            for (int i = 0; i < of.size; i++) {
                right += of.cell(c, i) * queries[static_cast<size_t>(q)][i];
                magnitude += std::abs(of.cell(c, i) * queries[static_cast<size_t>(q)][i]);
            }
            check(std::abs(own[c] - right) <= 1e-6 * magnitude, what + ": dot product");
            check(own[c] == scores[static_cast<size_t>(q * tile + c)], what + ": dot product alone and with others");
        }
        for (int i = 0; i < of.size; i++) {
            double right = 0.5, magnitude = 0.5;
            for (int c = 0; c < of.n_cells; c++) {
                right += of.cell(c, i) * weights[static_cast<size_t>(q)][c];
                magnitude += std::abs(of.cell(c, i) * weights[static_cast<size_t>(q)][c]);
            }
            check(std::abs(own_sums[i] - right) <= 3e-6 * magnitude, what + ": sum of values");
            check(own_sums[i] == sums[static_cast<size_t>(q * of.size + i)], what + ": sum alone and with others");
        }
    }
}

void test_weights(std::mt19937 & random) {
    const Attention & kernel = *attention();
    std::uniform_real_distribution<float> uniform(-100.0f, 20.0f);
    std::vector<float> products(tile), bias(tile), scores, weights;
    for (int round = 0; round < 100; round++) {
        const float cap = round % 3 == 0 ? 5.0f : 0.0f;
        for (int c = 0; c < tile; c++) {
            products[static_cast<size_t>(c)] = uniform(random);
            bias[static_cast<size_t>(c)] = random() % 4 == 0 ? -INFINITY : random() % 2 == 0 ? 0.5f : 0.0f;
        }
        bias[7] = 0.0f;
        scores = products;
        const float most = kernel.finish(scores.data(), 2.0f, cap, bias.data());
        check(most == *std::max_element(scores.begin(), scores.end()), "the largest");
        weights = scores;
        const int64_t sum = kernel.exponentials(weights.data(), most);
        double right_sum = 0.0;
        for (size_t c = 0; c < scores.size(); c++) {
            double score = 2.0 * static_cast<double>(products[c]);
            score = (cap != 0.0f ? static_cast<double>(cap) * std::tanh(score) : score) + static_cast<double>(bias[c]);
            check(std::isinf(bias[c]) ? scores[c] == -INFINITY : std::abs(scores[c] - score) <= 1e-5, "a score");
            const double right = std::exp(static_cast<double>(scores[c] - most)); // the difference, rounded
            check(right < 1e-37 ? weights[c] <= 1e-37f : std::abs(weights[c] - right) <= 3e-7 * right, "exponential");
            check(std::isfinite(scores[c]) || weights[c] == 0.0f, "nothing of what is hidden");
            right_sum += std::nearbyint(static_cast<double>(weights[c]) * weight_unit);
        }
        check(static_cast<double>(sum) == right_sum, "the sum of rounded weights");
    }
    scores.assign(tile, -INFINITY);
    scores[3] = NAN;
    scores[5] = 1.0f;
    check(kernel.finish(scores.data(), 1.0f, 0.0f, nullptr) == 1.0f, "the largest number");
    kernel.exponentials(scores.data(), 1.0f);
    check(std::isnan(scores[3]) && scores[2] == 0.0f && scores[5] == 1.0f, "a NaN is not lost");
    scores.assign(tile, -INFINITY);
    check(kernel.finish(scores.data(), 1.0f, 0.0f, nullptr) == -INFINITY, "the largest of none");
}

// What cells of every type hold, and that queries are multiplied by that.
void test_types(std::mt19937 & random) {
    const Attention & kernel = *attention();
    constexpr int size = 96;
    const auto put_half = [](uint8_t * at, int k) {
        const uint16_t half = half_of(k);
        std::memcpy(at, &half, sizeof(half));
    };
    for (const CellType type : {CellType::f16, CellType::bf16, CellType::q8_0, CellType::q4_0}) {
        for (const int n_queries : {1, 5, 9}) { // nine: quantised cells are converted once for all
            std::vector<std::vector<uint8_t>> cells(tile, std::vector<uint8_t>(2 * size + 8));
            std::vector<std::vector<float>> right(tile, std::vector<float>(size));
            std::vector<const void *> rows;
            for (size_t c = 0; c < tile; c++) {
                uint8_t * const bytes = cells[c].data();
                for (int i = 0; i < size; i++) {
                    const int block = i / 32, k = static_cast<int>(random() % 129) - 64, d = block + 1;
                    float & value = right[c][static_cast<size_t>(i)];
                    value = static_cast<float>(k) / 64.0f;
                    if (type == CellType::f16) {
                        put_half(bytes + 2 * i, k);
                    } else if (type == CellType::bf16) { // the upper half of a float; k has seven bits
                        uint32_t bits;
                        std::memcpy(&bits, &value, sizeof(bits));
                        std::memcpy(bytes + 2 * i, reinterpret_cast<const char *>(&bits) + 2, 2);
                    } else if (type == CellType::q8_0) {
                        put_half(bytes + 34 * block, d);
                        bytes[34 * block + 2 + i % 32] = static_cast<uint8_t>(k);
                        value = static_cast<float>(d * k) / 64.0f;
                    } else {
                        const int q = k & 15;
                        put_half(bytes + 18 * block, d);
                        uint8_t & byte = bytes[18 * block + 2 + i % 16];
                        byte = static_cast<uint8_t>(i % 32 < 16 ? q : byte | q << 4);
                        value = static_cast<float>(d * (q - 8)) / 64.0f;
                    }
                }
                rows.push_back(bytes);
                std::vector<float> converted(size);
                kernel.convert(type, bytes, size, converted.data());
                check(converted == right[c], "the numbers of a cell, type " + std::to_string(static_cast<int>(type)));
            }
            std::vector<float> query(size, 0.0f), out(static_cast<size_t>(n_queries * tile)), room(tile * size);
            query[3] = 1.0f;
            query[77] = 2.0f;
            const std::vector<const float *> queries(static_cast<size_t>(n_queries), query.data());
            kernel.dot_products({rows.data(), tile, type}, size, queries.data(), n_queries,
                                rows_of(out.data(), n_queries, tile).data(), room.data());
            for (size_t i = 0; i < out.size(); i++) {
                const std::vector<float> & own = right[i % tile];
                check(out[i] == own[3] + 2.0f * own[77], "dot products with cells of a type");
            }
            const std::vector<float> weight(tile, 1.0f);
            std::vector<float> sums(size, 0.0f);
            const std::vector<const float *> weights = {weight.data()};
            const std::vector<float *> sums_into = {sums.data()};
            kernel.add_weighted({rows.data(), tile, type}, size, weights.data(), 1, sums_into.data(), room.data());
            for (size_t i = 0; i < size; i++) {
                float sum = 0.0f;
                for (size_t c = 0; c < tile; c++) {
                    sum += right[c][i];
                }
                check(sums[i] == sum, "sums of cells of a type");
            }
        }
    }
}

// Any bits, but scales and numbers of magnitudes that occur.
std::vector<uint8_t> make_cell(CellType type, int size, std::mt19937 & random) {
    std::vector<uint8_t> bytes(static_cast<size_t>(2 * size + 64));
    for (uint8_t & byte : bytes) {
        byte = static_cast<uint8_t>(random());
    }
    const size_t step = type == CellType::q8_0 ? 34 : type == CellType::q4_0 ? 18 : 2;
    for (size_t at = 0; at + 2 <= bytes.size(); at += step) {
        const uint32_t mantissa = type == CellType::bf16 ? random() & 0x81FF : random() & 0x8FFF;
        const uint16_t half = static_cast<uint16_t>((type == CellType::bf16 ? 0x3E00 : 0x3000) | mantissa);
        std::memcpy(&bytes[at], &half, sizeof(half));
    }
    return bytes;
}

// Without tanh, which is the C library's.
void test_bits(std::mt19937 & random) {
    const Attention & kernel = *attention();
    Bits bits;
    for (const CellType type : {CellType::f16, CellType::bf16, CellType::q8_0, CellType::q4_0}) {
        for (const int size : {64, 96, 576}) {
            for (const int n_cells : {1, 7, tile}) {
                for (const int n_queries : {1, 4, 9}) {
                    std::vector<std::vector<uint8_t>> cells;
                    std::vector<const void *> rows;
                    for (int c = 0; c < n_cells; c++) {
                        cells.push_back(make_cell(type, size, random));
                        rows.push_back(cells.back().data());
                    }
                    std::vector<float> queries(static_cast<size_t>(n_queries * size)), bias(tile), room(tile * 576);
                    for (float & number : queries) {
                        number = bell(random);
                    }
                    for (float & number : bias) {
                        number = random() % 8 == 0 ? -INFINITY : bell(random);
                    }
                    std::vector<float> scores(static_cast<size_t>(n_queries * tile)), sums(queries);
                    const auto of_scores = rows_of(scores.data(), n_queries, tile);
                    kernel.dot_products({rows.data(), n_cells, type}, size,
                                        rows_of<const float>(queries.data(), n_queries, size).data(), n_queries,
                                        of_scores.data(), room.data());
                    for (float * own : of_scores) {
                        std::fill(own + n_cells, own + tile, 0.0f);
                        bits.add(own, tile * sizeof(float));
                        const float most = kernel.finish(own, 0.3f, 0.0f, n_queries == 4 ? nullptr : bias.data());
                        const int64_t sum = kernel.exponentials(own, most);
                        bits.add(&most, sizeof(most));
                        bits.add(&sum, sizeof(sum));
                        bits.add(own, tile * sizeof(float));
                    }
                    kernel.add_weighted({rows.data(), n_cells, type}, size,
                                        rows_of<const float>(scores.data(), n_queries, tile).data(), n_queries,
                                        rows_of(sums.data(), n_queries, size).data(), room.data());
                    bits.add(sums);
                    kernel.convert(type, rows[0], size, room.data());
                    bits.add(room.data(), static_cast<size_t>(size) * sizeof(float));
                }
            }
        }
    }
    check(bits.all() == 0xE798918D7091F420, "other bits than on other instruction sets, " + bits.in_hex());
}

} // namespace

int main() {
    if (attention() == nullptr) {
        std::printf("skipped: no instruction set\n");
        return 0;
    }
    std::mt19937 random(11);
    for (const int size : {8, 64, 72, 80, 128, 192, 256, 576}) {
        for (const int n_cells : {1, 2, 5, 31, 32}) {
            for (const int n_queries : {1, 2, 3, 4, 5, 6, 7, 12, 17}) {
                test_sums(Case(size, n_cells, n_queries, random));
            }
        }
    }
    test_weights(random);
    test_types(random);
    test_bits(random);
    std::printf("%s\n", n_failed == 0 ? "ok" : "failed");
    return n_failed == 0 ? 0 : 1;
}
