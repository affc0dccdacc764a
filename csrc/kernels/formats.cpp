#include "formats.h"

#include <cstring>

namespace pyfly::kernels {

namespace {

uint16_t read_16(const uint8_t * from) {
    uint16_t out;
    std::memcpy(&out, from, sizeof(out));
    return out;
}

void set_one_scale(DecodedBlock & out) {
    std::memset(out.scales, 1, sizeof(out.scales));
    std::memset(out.mins, 1, sizeof(out.mins));
}

// 32 nibbles: the low ones of 16 bytes, then the high ones.
void read_nibbles(const uint8_t * from, uint8_t * q) {
    for (int i = 0; i < 16; i++) {
        q[i] = from[i] & 15;
        q[i + 16] = from[i] >> 4;
    }
}

// A fifth bit for each of 32 weights.
void add_fifth_bits(const uint8_t * bits, uint8_t * q) {
    for (int i = 0; i < 32; i++) {
        q[i] |= static_cast<uint8_t>((bits[i / 8] >> (i % 8) & 1) << 4);
    }
}

// A fifth bit for each of 256 weights, 32 with every bit of `bits`.
void add_fifth_bits_k(const uint8_t * bits, uint8_t * q) {
    for (int i = 0; i < 256; i++) {
        q[i] |= static_cast<uint8_t>((bits[i % 32] >> (i / 32) & 1) << 4);
    }
}

// 256 nibbles, 64 from each 32 bytes: the low ones, then the high ones.
void read_nibbles_k(const uint8_t * from, uint8_t * q) {
    for (int i = 0; i < 256; i++) {
        const uint8_t byte = from[i / 64 * 32 + i % 32];
        q[i] = i % 64 < 32 ? byte & 15 : byte >> 4;
    }
}

// 256 times two bits, 128 from each 32 bytes: the lowest two of each byte, then the next two, ...
void read_two_bits_k(const uint8_t * from, uint8_t * q) {
    for (int i = 0; i < 256; i++) {
        q[i] = from[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
    }
}

// Eight scales and eight minima of six bits in 12 bytes, as in Q4_K and Q5_K.
void read_scales_and_mins(const uint8_t * from, DecodedBlock & out) {
    for (int i = 0; i < 4; i++) {
        out.scales[i] = static_cast<int8_t>(from[i] & 63);
        out.mins[i] = from[i + 4] & 63;
        out.scales[i + 4] = static_cast<int8_t>((from[i + 8] & 15) | (from[i] >> 6) << 4);
        out.mins[i + 4] = static_cast<uint8_t>(from[i + 8] >> 4 | (from[i + 4] >> 6) << 4);
    }
}

} // namespace

template <> void decode_block<WeightType::q4_0>(const uint8_t * block, DecodedBlock & out) {
    set_one_scale(out);
    out.d = read_16(block);
    out.m = 0;
    read_nibbles(block + 2, out.q);
}

template <> void decode_block<WeightType::iq4_nl>(const uint8_t * block, DecodedBlock & out) {
    decode_block<WeightType::q4_0>(block, out);
}

template <> void decode_block<WeightType::q4_1>(const uint8_t * block, DecodedBlock & out) {
    set_one_scale(out);
    out.d = read_16(block);
    out.m = read_16(block + 2) ^ 0x8000; // it is added
    read_nibbles(block + 4, out.q);
}

template <> void decode_block<WeightType::q5_0>(const uint8_t * block, DecodedBlock & out) {
    set_one_scale(out);
    out.d = read_16(block);
    out.m = 0;
    read_nibbles(block + 6, out.q);
    add_fifth_bits(block + 2, out.q);
}

template <> void decode_block<WeightType::q5_1>(const uint8_t * block, DecodedBlock & out) {
    set_one_scale(out);
    out.d = read_16(block);
    out.m = read_16(block + 2) ^ 0x8000;
    read_nibbles(block + 8, out.q);
    add_fifth_bits(block + 4, out.q);
}

template <> void decode_block<WeightType::q8_0>(const uint8_t * block, DecodedBlock & out) {
    set_one_scale(out);
    out.d = read_16(block);
    out.m = 0;
    std::memcpy(out.q, block + 2, 32);
}

template <> void decode_block<WeightType::mxfp4>(const uint8_t * block, DecodedBlock & out) {
    set_one_scale(out);
    out.d = block[0];
    out.m = 0;
    read_nibbles(block + 1, out.q);
}

template <> void decode_block<WeightType::q2_k>(const uint8_t * block, DecodedBlock & out) {
    for (int i = 0; i < 16; i++) {
        out.scales[i] = static_cast<int8_t>(block[i] & 15);
        out.mins[i] = block[i] >> 4;
    }
    read_two_bits_k(block + 16, out.q);
    out.d = read_16(block + 80);
    out.m = read_16(block + 82);
}

template <> void decode_block<WeightType::q3_k>(const uint8_t * block, DecodedBlock & out) {
    const uint8_t * scales = block + 96;
    for (int i = 0; i < 16; i++) {
        const int low = i < 8 ? scales[i] & 15 : scales[i - 8] >> 4;
        const int high = scales[8 + i % 4] >> (i / 4 * 2) & 3;
        out.scales[i] = static_cast<int8_t>((low | high << 4) - 32);
        out.mins[i] = 0;
    }
    read_two_bits_k(block + 32, out.q);
    for (int i = 0; i < 256; i++) {
        out.q[i] |= static_cast<uint8_t>((block[i % 32] >> (i / 32) & 1) << 2);
    }
    out.d = read_16(block + 108);
    out.m = 0;
}

template <> void decode_block<WeightType::q4_k>(const uint8_t * block, DecodedBlock & out) {
    out.d = read_16(block);
    out.m = read_16(block + 2);
    read_scales_and_mins(block + 4, out);
    read_nibbles_k(block + 16, out.q);
}

template <> void decode_block<WeightType::q5_k>(const uint8_t * block, DecodedBlock & out) {
    out.d = read_16(block);
    out.m = read_16(block + 2);
    read_scales_and_mins(block + 4, out);
    read_nibbles_k(block + 48, out.q);
    add_fifth_bits_k(block + 16, out.q);
}

template <> void decode_block<WeightType::q6_k>(const uint8_t * block, DecodedBlock & out) {
    for (int i = 0; i < 256; i++) {
        const int half = i / 128, quarter = i % 128 / 32, at = i % 32;
        const uint8_t low = block[half * 64 + quarter % 2 * 32 + at];
        const uint8_t high = block[128 + half * 32 + at] >> (quarter * 2) & 3;
        out.q[i] = static_cast<uint8_t>((quarter < 2 ? low & 15 : low >> 4) | high << 4);
    }
    std::memcpy(out.scales, block + 192, 16);
    std::memset(out.mins, 0, sizeof(out.mins));
    out.d = read_16(block + 208);
    out.m = 0;
}

template <> void decode_block<WeightType::iq4_xs>(const uint8_t * block, DecodedBlock & out) {
    const int high = read_16(block + 2);
    for (int i = 0; i < 8; i++) {
        const int low = block[4 + i / 2] >> (i % 2 * 4) & 15;
        out.scales[i] = static_cast<int8_t>((low | (high >> (2 * i) & 3) << 4) - 32);
        out.mins[i] = 0;
        read_nibbles(block + 8 + i * 16, out.q + i * 32);
    }
    out.d = read_16(block);
    out.m = 0;
}

} // namespace pyfly::kernels
