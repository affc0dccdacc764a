// Vectors of sixteen 32-bit lanes: what AVX-512 F, BW and VL have. See simd_256.h for what the functions are.
#include <cstdint>
#include <cstring>

#include <immintrin.h>

#include "bytes_256.h"
#include "lanes.h"

namespace pyfly::kernels {
namespace PYFLY_KERNELS_LEVEL {
namespace {

struct Lanes512 : Bytes256 {
    using I = __m512i;
    using F = __m512;
    static constexpr int lanes = 16;

    PYFLY_LANES I load(const void * p) { return _mm512_loadu_si512(p); }
    PYFLY_LANES void store_bytes(void * p, I v) { _mm512_storeu_si512(p, v); }
    PYFLY_LANES I zero() { return _mm512_setzero_si512(); }
    PYFLY_LANES I broadcast(const int32_t * p) { return _mm512_set1_epi32(*p); }
    PYFLY_LANES I add(I a, I b) { return _mm512_add_epi32(a, b); }
    PYFLY_LANES I or_bits(I a, I b) { return _mm512_or_si512(a, b); }
    PYFLY_LANES I flip_bits(I a, I which) { return _mm512_xor_si512(a, which); }
    PYFLY_LANES I and_bytes(I a, int byte) { return _mm512_and_si512(a, _mm512_set1_epi8(static_cast<char>(byte))); }
    PYFLY_LANES I flip_sign(I a) { return _mm512_xor_si512(a, _mm512_set1_epi8(-128)); }
    PYFLY_LANES I shift_right_16(I a, int n) {
        return n >= 0 ? _mm512_srli_epi16(a, static_cast<unsigned>(n))
                      : _mm512_slli_epi16(a, static_cast<unsigned>(-n));
    }
    PYFLY_LANES I shift_left_32(I a, int n) { return _mm512_slli_epi32(a, static_cast<unsigned>(n)); }
    PYFLY_LANES I look_up(const int8_t * table, int offset, I q) {
        const __m128i row = _mm_add_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table)),
                                         _mm_set1_epi8(static_cast<char>(offset)));
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(row), q);
    }
    template <bool is_signed> PYFLY_LANES I load_pairs(const uint8_t * p) {
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
        return is_signed ? _mm512_cvtepi8_epi16(bytes) : _mm512_cvtepu8_epi16(bytes);
    }

    PYFLY_LANES F zero_float() { return _mm512_setzero_ps(); }
    PYFLY_LANES F load_float(const float * p) { return _mm512_loadu_ps(p); }
    PYFLY_LANES void store(float * p, F v) { _mm512_storeu_ps(p, v); }
    PYFLY_LANES F to_float(I a) { return _mm512_cvtepi32_ps(a); }
    PYFLY_LANES F multiply(F a, F b) { return _mm512_mul_ps(a, b); }
    PYFLY_LANES F add_floats(F a, F b) { return _mm512_add_ps(a, b); }
    PYFLY_LANES F multiply_add(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    PYFLY_LANES F multiply_subtract(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
    PYFLY_LANES F broadcast_float(const int32_t * p) {
        float value;
        std::memcpy(&value, p, sizeof(value));
        return _mm512_set1_ps(value);
    }
    PYFLY_LANES F from_halves(const uint8_t * p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    }
    PYFLY_LANES F from_bfloats(const uint8_t * p) {
        const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }
    PYFLY_LANES F from_exponents(const uint8_t * p) {
        const I e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
        return _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(e, 23)), _mm512_set1_ps(0.5f));
    }
};

} // namespace
} // namespace PYFLY_KERNELS_LEVEL
} // namespace pyfly::kernels
