// Products of packed weights against the product of the decoded weights, for every type and number of rows, on the
// instruction set that PYFLY_ISA names or the best one of this machine. Their bits are those of every other one.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "bits.h"
#include "check.h"
#include "kernels/for_each_type.h"
#include "kernels/packing.h"
#include "kernels/products.h"

using namespace pyfly::kernels;

namespace {

double from_half(uint16_t half) {
    const int exponent = half >> 10 & 31, mantissa = half & 1023;
    const double value = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(mantissa | 1024, exponent - 25);
    return half >> 15 ? -value : value;
}

double from_bfloat(uint16_t bits) {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof(value));
    return value;
}

template <WeightType type> void append_weights(const uint8_t * row, size_t n_in, std::vector<double> & out) {
    using F = Format<type>;
    DecodedBlock block;
    for (size_t i = 0; i < n_in; i += F::block, row += F::bytes) {
        decode_block<type>(row, block);
        const double d = type == WeightType::mxfp4 ? std::ldexp(1.0, block.d - 128) : from_half(block.d);
        for (int k = 0; k < F::block; k++) {
            double value;
            if constexpr (F::values == Values::number) {
                value = block.q[k] - F::offset;
            } else if constexpr (F::values == Values::byte) {
                value = static_cast<int8_t>(block.q[k]);
            } else {
                value = F::table[block.q[k]];
            }
            out.push_back(d * block.scales[k / F::group] * value - from_half(block.m) * block.mins[k / F::group]);
        }
    }
}

std::vector<double> weights_of(WeightType type, const uint8_t * row, size_t n_in) {
    std::vector<double> out;
    switch (type) {
#define PYFLY_WEIGHTS(name)                                                                                            \
    case WeightType::name:                                                                                             \
        append_weights<WeightType::name>(row, n_in, out);                                                              \
        break;
        PYFLY_FOR_EACH_FORMAT(PYFLY_WEIGHTS)
#undef PYFLY_WEIGHTS
        case WeightType::f32:
            for (size_t i = 0; i < n_in; i++) {
                float value;
                std::memcpy(&value, row + 4 * i, 4);
                out.push_back(value);
            }
            break;
        case WeightType::f16:
        case WeightType::bf16:
            for (size_t i = 0; i < n_in; i++) {
                uint16_t bits;
                std::memcpy(&bits, row + 2 * i, 2);
                out.push_back(type == WeightType::f16 ? from_half(bits) : from_bfloat(bits));
            }
    }
    return out;
}

struct Type {
    WeightType type;
    const char * name;
    size_t block, bytes;        // in a file
    std::vector<size_t> halves; // where a block has F16 numbers
    uint64_t bits;              // of all products: those of AVX2, which every instruction set must have
};

const std::vector<Type> types = {
    {WeightType::q4_0, "q4_0", 32, 18, {0}, 0xC4B02CFEECC48E54},
    {WeightType::q4_1, "q4_1", 32, 20, {0, 2}, 0x34C38C5A74FAFBC9},
    {WeightType::q5_0, "q5_0", 32, 22, {0}, 0x87F422C885826545},
    {WeightType::q5_1, "q5_1", 32, 24, {0, 2}, 0xAF60C58C4636BBD8},
    {WeightType::q8_0, "q8_0", 32, 34, {0}, 0x1B324AAB194217B0},
    {WeightType::q2_k, "q2_k", 256, 84, {80, 82}, 0xCE5223D144FBA524},
    {WeightType::q3_k, "q3_k", 256, 110, {108}, 0x5C6570305697AABB},
    {WeightType::q4_k, "q4_k", 256, 144, {0, 2}, 0xB1421A9468CFA66D},
    {WeightType::q5_k, "q5_k", 256, 176, {0, 2}, 0xFE1EB90EEEC1C687},
    {WeightType::q6_k, "q6_k", 256, 210, {208}, 0x91FB173BC79BF2BD},
    {WeightType::iq4_nl, "iq4_nl", 32, 18, {0}, 0xA449A582F73E8B6A},
    {WeightType::iq4_xs, "iq4_xs", 256, 136, {0}, 0x5CBF8FAB5F285470},
    {WeightType::mxfp4, "mxfp4", 32, 17, {}, 0x57E00DA13986B5A9},
    {WeightType::f16, "f16", 1, 2, {0}, 0x446D9F36AFB46FD0},
    {WeightType::bf16, "bf16", 1, 2, {}, 0x38FA05C932C93C2F},
    {WeightType::f32, "f32", 1, 4, {}, 0x7DD653223EAFB890},
};

// What weights and activations are made of.
struct Numbers {
    const char * name;
    std::function<uint8_t(std::mt19937 &)> byte;               // of the weights' file
    std::function<float(std::mt19937 &, size_t i)> activation; // the i-th
};

const Numbers usual = {"usual", [](std::mt19937 & random) { return static_cast<uint8_t>(random()); },
                       [](std::mt19937 & random, size_t) { return bell(random); }};

// Sums as large as they can be: the largest weights, and activations that are all as large.
std::vector<Numbers> extremes() {
    std::vector<Numbers> out;
    const auto weights = [](uint8_t byte) { return [byte](std::mt19937 &) { return byte; }; };
    const auto either = [](std::mt19937 & random) { return static_cast<uint8_t>(random() & 1 ? 0xFF : 0x00); };
    const auto every = [](size_t n) { return [n](std::mt19937 &, size_t i) { return i / n % 2 == 0 ? 1.0f : -1.0f; }; };
    const std::vector<std::pair<const char *, std::function<uint8_t(std::mt19937 &)>>> bytes = {
        {"ones", weights(0xFF)},
        {"zeros", weights(0x00)},
        {"either", either},
        {"high nibbles", weights(0xF0)},
        {"high bits", weights(0x80)}};
    for (const auto & [name, byte] : bytes) {
        out.push_back({name, byte, [](std::mt19937 &, size_t) { return 1.0f; }});
        out.push_back({name, byte, [](std::mt19937 &, size_t) { return -1.0f; }});
        out.push_back({name, byte, every(1)});
        out.push_back({name, byte, every(2)});
        out.push_back({name, byte, [](std::mt19937 & random, size_t) { return random() & 1 ? 1.0f : -1.0f; }});
    }
    return out;
}

// Rows of a file: any bits, but numbers of about 1/128 to 1/32 where they are floats.
std::vector<uint8_t> make_rows(const Type & type, size_t n_in, size_t n_out, const Numbers & numbers,
                               std::mt19937 & random) {
    std::vector<uint8_t> rows(n_in / type.block * type.bytes * n_out);
    for (uint8_t & byte : rows) {
        byte = numbers.byte(random);
    }
    for (size_t at = 0; at < rows.size(); at += type.bytes) {
        for (const size_t half : type.halves) {
            const uint16_t bits = static_cast<uint16_t>(0x2000 | (random() & 0x87FF));
            std::memcpy(&rows[at + half], &bits, 2);
        }
        if (type.type == WeightType::mxfp4) {
            rows[at] = static_cast<uint8_t>(120 + random() % 5);
        } else if (type.type == WeightType::bf16) {
            const uint16_t bits = static_cast<uint16_t>(0x3C00 | (random() & 0x80FF));
            std::memcpy(&rows[at], &bits, 2);
        } else if (type.type == WeightType::f32) {
            const float value = static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 16000.0f;
            std::memcpy(&rows[at], &value, 4);
        }
    }
    return rows;
}

// x[n_rows][n_in] times the packed matrix: [n_rows][n_out].
std::vector<float> multiply(WeightType type, const std::vector<uint8_t> & packed, size_t n_in, size_t n_out,
                            const float * x, size_t n_rows) {
    const Products & products = *pyfly::kernels::products(type, n_rows);
    const size_t words = products.row_words(n_in), n_strip = products.strip_rows;
    std::vector<int32_t> strips(words * n_rows + read_behind / sizeof(int32_t));
    for (size_t r = 0; r < n_rows; r++) {
        const size_t first = r / n_strip * n_strip;
        products.quantise(x + r * n_in, n_in, strips.data() + first * words,
                          static_cast<int>(std::min(n_strip, n_rows - first)), static_cast<int>(r - first));
    }
    std::vector<float> out(n_rows * n_out);
    std::vector<float *> places(n_rows);
    for (size_t r = 0; r < n_rows; r++) {
        places[r] = out.data() + r * n_out;
    }
    products.multiply(packed.data(), n_out / panel, n_in, strips.data(), n_rows, places.data());
    return out;
}

void test_type(const Type & type, size_t n_in, const Numbers & numbers, std::mt19937 & random, Bits & bits) {
    constexpr size_t n_own = 27, n_out = 32; // the last panel has five outputs less
    const std::string what = std::string(type.name) + ", " + std::to_string(n_in) + " inputs, " + numbers.name;
    check(can_pack(type.type, n_in, n_own) && n_panels(n_own) == n_out / panel, what + ": can be packed");
    check(row_bytes(type.type, n_in) == n_in / type.block * type.bytes, what + ": bytes of a row");
    const std::vector<uint8_t> rows = make_rows(type, n_in, n_own, numbers, random);
    std::vector<uint8_t> packed(panel_bytes(type.type, n_in) * (n_out / panel));
    for (size_t p = 0; p < n_out / panel; p++) {
        pack_panel(type.type, n_in, rows.data() + p * panel * row_bytes(type.type, n_in),
                   std::min<size_t>(panel, n_own - p * panel), packed.data() + p * panel_bytes(type.type, n_in));
    }
    std::vector<uint8_t> unpacked(rows.size());
    for (size_t p = 0; p < n_out / panel; p++) {
        unpack_panel(type.type, n_in, packed.data() + p * panel_bytes(type.type, n_in),
                     std::min<size_t>(panel, n_own - p * panel),
                     unpacked.data() + p * panel * row_bytes(type.type, n_in));
    }
    check(unpacked == rows, what + ": the bytes of the file come back");
    std::vector<float> x(most_rows * n_in);
    for (size_t i = 0; i < x.size(); i++) {
        x[i] = numbers.activation(random, i);
    }
    std::vector<float> alone;
    for (size_t r = 0; r < most_rows; r++) {
        const std::vector<float> row = multiply(type.type, packed, n_in, n_out, x.data() + r * n_in, 1);
        alone.insert(alone.end(), row.begin(), row.end());
    }
    bits.add(alone);
    for (size_t n = 2; n <= pyfly::kernels::products(type.type, n)->rows_together; n += n < 18 ? 1 : 10) {
        const std::vector<float> together = multiply(type.type, packed, n_in, n_out, x.data(), n);
        check(std::memcmp(together.data(), alone.data(), together.size() * sizeof(float)) == 0,
              what + ": the bits of " + std::to_string(n) + " rows are those of each alone");
    }
    // Rounding an activation to a byte moves a product by at most half a step of it.
    const double most = is_dense(type.type) ? 1e-6 : 4e-3;
    for (size_t r = 0; r < most_rows; r++) {
        for (size_t o = n_own; o < n_out; o++) {
            check(alone[r * n_out + o] == 0.0f, what + ": an output that there is not");
        }
    }
    for (size_t o = 0; o < n_own; o++) {
        const std::vector<double> w = weights_of(type.type, rows.data() + o * row_bytes(type.type, n_in), n_in);
        for (size_t r = 0; r < 5; r++) {
            double right = 0.0, magnitude = 0.0;
            for (size_t i = 0; i < n_in; i++) {
                right += w[i] * x[r * n_in + i];
                magnitude += std::abs(w[i] * x[r * n_in + i]);
            }
            check(std::abs(alone[r * n_out + o] - right) <= most * magnitude, what + ": product");
        }
    }
    // Zeros, and what is no number.
    std::vector<float> odd(n_in, 0.0f);
    for (const float value : multiply(type.type, packed, n_in, n_out, odd.data(), 1)) {
        check(value == 0.0f, what + ": zero");
    }
    for (const float tiny : {1e-45f, 1e-38f, 3e-37f}) {
        odd.assign(n_in, tiny);
        for (const float value : multiply(type.type, packed, n_in, n_out, odd.data(), 1)) {
            check(is_dense(type.type) || value == 0.0f, what + ": activations that are too small");
        }
    }
    odd.assign(n_in, 0.0f);
    odd[n_in / 2] = NAN;
    for (const float value : multiply(type.type, packed, n_in, n_out, odd.data(), 1)) {
        check(!std::isfinite(value), what + ": a NaN is not lost");
    }
}

} // namespace

int main() {
    if (std::strcmp(instruction_set(), "none") == 0) {
        std::printf("skipped: no instruction set\n");
        return 0;
    }
    std::mt19937 random(7);
    for (const Type & type : types) {
        Bits bits;
        for (const size_t n_in : {256, 512, 1280}) {
            test_type(type, n_in, usual, random, bits);
        }
        if (type.block < 256) {
            test_type(type, 96, usual, random, bits);
        }
        for (const Numbers & numbers : extremes()) {
            test_type(type, 512, numbers, random, bits);
        }
        check(bits.all() == type.bits,
              std::string(type.name) + ": other bits than on other instruction sets, " + bits.in_hex());
        check(!can_pack(type.type, 0, 16) && !can_pack(type.type, 256, 0),
              std::string(type.name) + ": shapes that do not fit");
        check(type.block == 1 || !can_pack(type.type, 256 + 16, 16), std::string(type.name) + ": half a block");
    }
    check(!can_pack(static_cast<WeightType>(4), 256, 16) && products(static_cast<WeightType>(5), 1) == nullptr,
          "an unknown type");
    std::printf("%s: %s\n", instruction_set(), n_failed == 0 ? "ok" : "failed");
    return n_failed == 0 ? 0 : 1;
}
