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
    for (int k = 0; k < 4; k++, q += 8) {
        for (int i = 0; i < 8; i++) {
            q[i] |= static_cast<uint8_t>((bits[k] >> i & 1) << 4);
        }
    }
}

// The loops of blocks of 256 run over bytes that lie side by side, so that compilers make vectors of them: packing is
// the largest part of loading a model.

// A high bit for each of 256 weights, 32 with every bit of `bits`.
void add_bits_k(const uint8_t * bits, int bit, uint8_t * q) {
    for (int k = 0; k < 8; k++, q += 32) {
        for (int i = 0; i < 32; i++) {
            q[i] |= static_cast<uint8_t>((bits[i] >> k & 1) << bit);
        }
    }
}

// 256 nibbles, 64 from each 32 bytes: the low ones, then the high ones.
void read_nibbles_k(const uint8_t * from, uint8_t * q) {
    for (int k = 0; k < 4; k++, from += 32, q += 64) {
        for (int i = 0; i < 32; i++) {
            q[i] = from[i] & 15;
            q[i + 32] = from[i] >> 4;
        }
    }
}

// 256 times two bits, 128 from each 32 bytes: the lowest two of each byte, then the next two, ...
void read_two_bits_k(const uint8_t * from, uint8_t * q) {
    for (int half = 0; half < 2; half++, from += 32) {
        for (int shift = 0; shift < 8; shift += 2, q += 32) {
            for (int i = 0; i < 32; i++) {
                q[i] = from[i] >> shift & 3;
            }
        }
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
    add_bits_k(block, 2, out.q);
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
    add_bits_k(block + 16, 4, out.q);
}

template <> void decode_block<WeightType::q6_k>(const uint8_t * block, DecodedBlock & out) {
    for (int half = 0; half < 2; half++) {
        const uint8_t *low = block + 64 * half, *high = block + 128 + 32 * half;
        uint8_t * q = out.q + 128 * half;
        for (int i = 0; i < 32; i++) {
            q[i] = static_cast<uint8_t>((low[i] & 15) | (high[i] & 3) << 4);
            q[i + 32] = static_cast<uint8_t>((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4);
            q[i + 64] = static_cast<uint8_t>(low[i] >> 4 | (high[i] >> 4 & 3) << 4);
            q[i + 96] = static_cast<uint8_t>(low[i + 32] >> 4 | high[i] >> 6 << 4);
        }
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
