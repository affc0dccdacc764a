// Vectors of eight 32-bit lanes: what AVX2 has, without the products of bytes, in which the instruction sets differ.
#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "bytes_256.h"
#include "lanes.h"

namespace pyfly::kernels {
namespace PYFLY_KERNELS_LEVEL {
namespace {

struct Lanes256 : Bytes256 {
    using I = __m256i;
    using F = __m256;
    static constexpr int lanes = 8;

    PYFLY_LANES I load(const void * p) { return _mm256_loadu_si256(static_cast<const I *>(p)); }
    PYFLY_LANES void store_bytes(void * p, I v) { _mm256_storeu_si256(static_cast<I *>(p), v); }
    PYFLY_LANES I zero() { return _mm256_setzero_si256(); }
    PYFLY_LANES I broadcast(const int32_t * p) { return _mm256_set1_epi32(*p); }
    PYFLY_LANES I add(I a, I b) { return _mm256_add_epi32(a, b); }
    PYFLY_LANES I or_bits(I a, I b) { return _mm256_or_si256(a, b); }
    PYFLY_LANES I flip_bits(I a, I which) { return _mm256_xor_si256(a, which); }
    PYFLY_LANES I and_bytes(I a, int byte) { return _mm256_and_si256(a, _mm256_set1_epi8(static_cast<char>(byte))); }
    PYFLY_LANES I flip_sign(I a) { return _mm256_xor_si256(a, _mm256_set1_epi8(-128)); }

    // By n bits, to the left where n < 0, in lanes of 16.
    PYFLY_LANES I shift_right_16(I a, int n) { return n >= 0 ? _mm256_srli_epi16(a, n) : _mm256_slli_epi16(a, -n); }

    PYFLY_LANES I shift_left_32(I a, int n) { return _mm256_slli_epi32(a, n); }

    // table[q] + offset for each byte q < 16.
    PYFLY_LANES I look_up(const int8_t * table, int offset, I q) {
        const __m128i row = _mm_add_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table)),
                                         _mm_set1_epi8(static_cast<char>(offset)));
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(row), q);
    }

    // Eight pairs of bytes as pairs of int16.
    template <bool is_signed> PYFLY_LANES I load_pairs(const uint8_t * p) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
        return is_signed ? _mm256_cvtepi8_epi16(bytes) : _mm256_cvtepu8_epi16(bytes);
    }

    // sum + a0 b0 + a1 b1 of pairs of int16.
    PYFLY_LANES I dot_pairs(I sum, I a, I b) { return add(sum, _mm256_madd_epi16(a, b)); }

    PYFLY_LANES F zero_float() { return _mm256_setzero_ps(); }
    PYFLY_LANES F load_float(const float * p) { return _mm256_loadu_ps(p); }
    PYFLY_LANES void store(float * p, F v) { _mm256_storeu_ps(p, v); }
    PYFLY_LANES F to_float(I a) { return _mm256_cvtepi32_ps(a); }
    PYFLY_LANES F multiply(F a, F b) { return _mm256_mul_ps(a, b); }
    PYFLY_LANES F add_floats(F a, F b) { return _mm256_add_ps(a, b); }
    PYFLY_LANES F multiply_add(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    PYFLY_LANES F multiply_subtract(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); } // c - a b

    PYFLY_LANES F broadcast_float(const int32_t * p) { return _mm256_broadcast_ss(reinterpret_cast<const float *>(p)); }
    PYFLY_LANES F from_halves(const uint8_t * p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    }
    PYFLY_LANES F from_bfloats(const uint8_t * p) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    }
    // 2^(e - 128): half of E8M0's 2^(e - 127), for values that are stored doubled. 0 for e = 0.
    PYFLY_LANES F from_exponents(const uint8_t * p) {
        const I e = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
        return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(e, 23)), _mm256_set1_ps(0.5f));
    }
};

} // namespace
} // namespace PYFLY_KERNELS_LEVEL
} // namespace pyfly::kernels
