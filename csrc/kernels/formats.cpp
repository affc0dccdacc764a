#include "formats.h"

#include <cstring>

namespace pyfly::kernels {

namespace {

uint16_t read_16(const uint8_t * from) {
    uint16_t out;
    std::memcpy(&out, from, sizeof(out));
    return out;
}

void write_16(uint16_t value, uint8_t * to) {
    std::memcpy(to, &value, sizeof(value));
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

void write_nibbles(const uint8_t * q, uint8_t * to) {
    for (int i = 0; i < 16; i++) {
        to[i] = static_cast<uint8_t>((q[i] & 15) | q[i + 16] << 4);
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

void write_fifth_bits(const uint8_t * q, uint8_t * bits) {
    for (int k = 0; k < 4; k++, q += 8) {
        bits[k] = 0;
        for (int i = 0; i < 8; i++) {
            bits[k] |= static_cast<uint8_t>((q[i] >> 4 & 1) << i);
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

void write_bits_k(const uint8_t * q, int bit, uint8_t * bits) {
    std::memset(bits, 0, 32);
    for (int k = 0; k < 8; k++, q += 32) {
        for (int i = 0; i < 32; i++) {
            bits[i] |= static_cast<uint8_t>((q[i] >> bit & 1) << k);
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

void write_nibbles_k(const uint8_t * q, uint8_t * to) {
    for (int k = 0; k < 4; k++, to += 32, q += 64) {
        for (int i = 0; i < 32; i++) {
            to[i] = static_cast<uint8_t>((q[i] & 15) | q[i + 32] << 4);
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

void write_two_bits_k(const uint8_t * q, uint8_t * to) {
    std::memset(to, 0, 64);
    for (int half = 0; half < 2; half++, to += 32) {
        for (int shift = 0; shift < 8; shift += 2, q += 32) {
            for (int i = 0; i < 32; i++) {
                to[i] |= static_cast<uint8_t>((q[i] & 3) << shift);
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

void write_scales_and_mins(const DecodedBlock & block, uint8_t * to) {
    for (int i = 0; i < 4; i++) {
        to[i] = static_cast<uint8_t>(block.scales[i] | block.scales[i + 4] >> 4 << 6);
        to[i + 4] = static_cast<uint8_t>(block.mins[i] | block.mins[i + 4] >> 4 << 6);
        to[i + 8] = static_cast<uint8_t>((block.scales[i + 4] & 15) | block.mins[i + 4] << 4);
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

// ---- And back -------------------------------------------------------------------------------------------------------

template <> void encode_block<WeightType::q4_0>(const DecodedBlock & block, uint8_t * out) {
    write_16(block.d, out);
    write_nibbles(block.q, out + 2);
}

template <> void encode_block<WeightType::iq4_nl>(const DecodedBlock & block, uint8_t * out) {
    encode_block<WeightType::q4_0>(block, out);
}

template <> void encode_block<WeightType::q4_1>(const DecodedBlock & block, uint8_t * out) {
    write_16(block.d, out);
    write_16(block.m ^ 0x8000, out + 2);
    write_nibbles(block.q, out + 4);
}

template <> void encode_block<WeightType::q5_0>(const DecodedBlock & block, uint8_t * out) {
    write_16(block.d, out);
    write_fifth_bits(block.q, out + 2);
    write_nibbles(block.q, out + 6);
}

template <> void encode_block<WeightType::q5_1>(const DecodedBlock & block, uint8_t * out) {
    write_16(block.d, out);
    write_16(block.m ^ 0x8000, out + 2);
    write_fifth_bits(block.q, out + 4);
    write_nibbles(block.q, out + 8);
}

template <> void encode_block<WeightType::q8_0>(const DecodedBlock & block, uint8_t * out) {
    write_16(block.d, out);
    std::memcpy(out + 2, block.q, 32);
}

template <> void encode_block<WeightType::mxfp4>(const DecodedBlock & block, uint8_t * out) {
    out[0] = static_cast<uint8_t>(block.d);
    write_nibbles(block.q, out + 1);
}

template <> void encode_block<WeightType::q2_k>(const DecodedBlock & block, uint8_t * out) {
    for (int i = 0; i < 16; i++) {
        out[i] = static_cast<uint8_t>(block.scales[i] | block.mins[i] << 4);
    }
    write_two_bits_k(block.q, out + 16);
    write_16(block.d, out + 80);
    write_16(block.m, out + 82);
}

template <> void encode_block<WeightType::q3_k>(const DecodedBlock & block, uint8_t * out) {
    uint8_t * scales = out + 96;
    std::memset(scales, 0, 12);
    for (int i = 0; i < 16; i++) {
        const int scale = block.scales[i] + 32;
        scales[i % 8] |= static_cast<uint8_t>((scale & 15) << (i / 8 * 4));
        scales[8 + i % 4] |= static_cast<uint8_t>(scale >> 4 << (i / 4 * 2));
    }
    write_bits_k(block.q, 2, out);
    write_two_bits_k(block.q, out + 32);
    write_16(block.d, out + 108);
}

template <> void encode_block<WeightType::q4_k>(const DecodedBlock & block, uint8_t * out) {
    write_16(block.d, out);
    write_16(block.m, out + 2);
    write_scales_and_mins(block, out + 4);
    write_nibbles_k(block.q, out + 16);
}

template <> void encode_block<WeightType::q5_k>(const DecodedBlock & block, uint8_t * out) {
    write_16(block.d, out);
    write_16(block.m, out + 2);
    write_scales_and_mins(block, out + 4);
    write_bits_k(block.q, 4, out + 16);
    write_nibbles_k(block.q, out + 48);
}

template <> void encode_block<WeightType::q6_k>(const DecodedBlock & block, uint8_t * out) {
    for (int half = 0; half < 2; half++) {
        uint8_t *low = out + 64 * half, *high = out + 128 + 32 * half;
        const uint8_t * q = block.q + 128 * half;
        for (int i = 0; i < 32; i++) {
            low[i] = static_cast<uint8_t>((q[i] & 15) | q[i + 64] << 4);
            low[i + 32] = static_cast<uint8_t>((q[i + 32] & 15) | q[i + 96] << 4);
            high[i] = static_cast<uint8_t>(q[i] >> 4 | q[i + 32] >> 4 << 2 | q[i + 64] >> 4 << 4 | q[i + 96] >> 4 << 6);
        }
    }
    std::memcpy(out + 192, block.scales, 16);
    write_16(block.d, out + 208);
}

template <> void encode_block<WeightType::iq4_xs>(const DecodedBlock & block, uint8_t * out) {
    int high = 0;
    std::memset(out + 4, 0, 4);
    for (int i = 0; i < 8; i++) {
        const int scale = block.scales[i] + 32;
        high |= scale >> 4 << (2 * i);
        out[4 + i / 2] |= static_cast<uint8_t>((scale & 15) << (i % 2 * 4));
        write_nibbles(block.q + i * 32, out + 8 + i * 16);
    }
    write_16(block.d, out);
    write_16(static_cast<uint16_t>(high), out + 2);
}

} // namespace pyfly::kernels
