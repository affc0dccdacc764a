// The weight types of GGUF files that kernels exist for: how many inputs a block has and what a weight in it is. The
// layouts are those of ggml (ggml/src/ggml-common.h); the numbers of the types are ggml's (enum ggml_type).
#pragma once

#include <cstddef>
#include <cstdint>

namespace pyfly::kernels {

enum class WeightType : int32_t {
    f32 = 0, // routers of experts are
    f16 = 1,
    q4_0 = 2,
    q4_1 = 3,
    q5_0 = 6,
    q5_1 = 7,
    q8_0 = 8,
    q2_k = 10,
    q3_k = 11,
    q4_k = 12,
    q5_k = 13,
    q6_k = 14,
    iq4_nl = 20,
    iq4_xs = 23,
    bf16 = 30,
    mxfp4 = 39,
};

// One block of one row of weights, taken apart. Weight i is d * scales[i / group] * value(q[i]) - m * mins[i / group],
// where `group` and `value` are the type's (see Format); types whose scale is one number have scales of 1, and a
// minimum that is added has m negated.
struct DecodedBlock {
    uint8_t q[256];    // the stored bits of each weight
    int8_t scales[16]; // one for each group
    uint8_t mins[16];  // likewise; 0 where the type has none
    uint16_t d, m;     // as stored: an F16, or in `d` the E8M0 exponent of MXFP4
};

// How the stored bits q of a weight become a number. Each has an unsigned form, u - Format::offset with 0 <= u <= 255.
enum class Values {
    number, // q - Format::offset, u = q
    byte,   // q is a signed byte
    table,  // Format::table[q], 16 signed bytes
};

constexpr int8_t table_iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t table_mxfp4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}; // twice the value

// What a type is. block: weights with one `d` of `d_bytes`; group: weights with one scale; bytes: of a block in a file.
// The bits of a weight are kept as a low part of `low` bits and a high part of `high` bits. has_short_scales: scales
// and minima have four bits and share a byte.
template <WeightType type> struct Format;

struct WithGroups { // blocks of 256 weights, with a scale for each group of them
    static constexpr int block = 256, d_bytes = 2;
    static constexpr bool has_groups = true, has_short_scales = false;
};

struct WithoutGroups { // blocks of 32 weights, with one scale
    static constexpr int block = 32, group = 32, d_bytes = 2;
    static constexpr bool has_groups = false, has_short_scales = false, has_signed_scales = false;
};

template <> struct Format<WeightType::q2_k> : WithGroups {
    static constexpr int bytes = 84, group = 16, low = 2, high = 0, offset = 0;
    static constexpr bool has_mins = true, has_signed_scales = false;
    static constexpr bool has_short_scales = true;
    static constexpr Values values = Values::number;
};

template <> struct Format<WeightType::q3_k> : WithGroups {
    static constexpr int bytes = 110, group = 16, low = 2, high = 1, offset = 4;
    static constexpr bool has_mins = false, has_signed_scales = true;
    static constexpr Values values = Values::number;
};

template <> struct Format<WeightType::q4_k> : WithGroups {
    static constexpr int bytes = 144, group = 32, low = 4, high = 0, offset = 0;
    static constexpr bool has_mins = true, has_signed_scales = false;
    static constexpr Values values = Values::number;
};

template <> struct Format<WeightType::q5_k> : WithGroups {
    static constexpr int bytes = 176, group = 32, low = 4, high = 1, offset = 0;
    static constexpr bool has_mins = true, has_signed_scales = false;
    static constexpr Values values = Values::number;
};

template <> struct Format<WeightType::q6_k> : WithGroups {
    static constexpr int bytes = 210, group = 16, low = 4, high = 2, offset = 32;
    static constexpr bool has_mins = false, has_signed_scales = true;
    static constexpr Values values = Values::number;
};

template <> struct Format<WeightType::iq4_xs> : WithGroups {
    static constexpr int bytes = 136, group = 32, low = 4, high = 0, offset = 128;
    static constexpr bool has_mins = false, has_signed_scales = true;
    static constexpr const int8_t * table = table_iq4;
    static constexpr Values values = Values::table;
};

template <> struct Format<WeightType::q4_0> : WithoutGroups {
    static constexpr int bytes = 18, low = 4, high = 0, offset = 8;
    static constexpr bool has_mins = false;
    static constexpr Values values = Values::number;
};

template <> struct Format<WeightType::q4_1> : WithoutGroups {
    static constexpr int bytes = 20, low = 4, high = 0, offset = 0;
    static constexpr bool has_mins = true;
    static constexpr Values values = Values::number;
};

template <> struct Format<WeightType::q5_0> : WithoutGroups {
    static constexpr int bytes = 22, low = 4, high = 1, offset = 16;
    static constexpr bool has_mins = false;
    static constexpr Values values = Values::number;
};

template <> struct Format<WeightType::q5_1> : WithoutGroups {
    static constexpr int bytes = 24, low = 4, high = 1, offset = 0;
    static constexpr bool has_mins = true;
    static constexpr Values values = Values::number;
};

template <> struct Format<WeightType::q8_0> : WithoutGroups {
    static constexpr int bytes = 34, low = 8, high = 0, offset = 128;
    static constexpr bool has_mins = false;
    static constexpr Values values = Values::byte;
};

template <> struct Format<WeightType::iq4_nl> : WithoutGroups {
    static constexpr int bytes = 18, low = 4, high = 0, offset = 128;
    static constexpr bool has_mins = false;
    static constexpr const int8_t * table = table_iq4;
    static constexpr Values values = Values::table;
};

template <> struct Format<WeightType::mxfp4> : WithoutGroups {
    static constexpr int bytes = 17, d_bytes = 1, low = 4, high = 0, offset = 12;
    static constexpr bool has_mins = false;
    static constexpr const int8_t * table = table_mxfp4;
    static constexpr Values values = Values::table;
};

// The largest u of a type's unsigned form.
template <WeightType type> constexpr int largest() {
    using F = Format<type>;
    if constexpr (F::values == Values::table) {
        int most = 0;
        for (int i = 0; i < 16; i++) {
            most = F::table[i] + F::offset > most ? F::table[i] + F::offset : most;
        }
        return most;
    } else {
        return (1 << (F::low + F::high)) - 1;
    }
}

// The types whose weights are floats; they are not taken apart.
constexpr bool is_dense(WeightType type) {
    return type == WeightType::f32 || type == WeightType::f16 || type == WeightType::bf16;
}

// Bytes of a weight of such a type.
constexpr size_t dense_width(WeightType type) {
    return type == WeightType::f32 ? 4 : 2;
}

// Takes the block at `block` apart.
template <WeightType type> void decode_block(const uint8_t * block, DecodedBlock & out);

// Writes the block that decode_block() took apart: the same bytes.
template <WeightType type> void encode_block(const DecodedBlock & block, uint8_t * out);

} // namespace pyfly::kernels
