// Vectors of four 32-bit lanes: what every 64-bit ARM processor has. See simd_256.h for what the functions are, and
// bytes_256.h for the first three.
#include <cstdint>
#include <cstring>

#include <arm_neon.h>

#include "lanes.h"

namespace pyfly::kernels {
namespace PYFLY_KERNELS_LEVEL {
namespace {

struct Lanes128 {
    using I = int32x4_t;
    using F = float32x4_t;
    static constexpr int lanes = 4;

    template <int n> PYFLY_LANES int sum_of(const int8_t * q) {
        static_assert(n % 16 == 0, "");
        int sum = 0;
        for (int i = 0; i < n; i += 16) {
            sum += vaddlvq_s8(vld1q_s8(q + i));
        }
        return sum;
    }
    template <int n> PYFLY_LANES int32_t largest_bits(const float * x) {
        I most = zero();
        for (int i = 0; i < n; i += 4) {
            most = vmaxq_s32(most, vreinterpretq_s32_f32(vabsq_f32(vld1q_f32(x + i))));
        }
        return vmaxvq_s32(most);
    }
    template <int n> PYFLY_LANES void round_to_bytes(const float * x, float scale, int8_t * q) {
        for (int i = 0; i < n; i += 8) {
            const auto rounded = [&](int at) {
                return vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + i + at), scale)));
            };
            vst1_s8(q + i, vqmovn_s16(vcombine_s16(rounded(0), rounded(4))));
        }
    }

    PYFLY_LANES I load(const void * p) { return vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t *>(p))); }
    PYFLY_LANES void store_bytes(void * p, I v) { vst1q_u8(static_cast<uint8_t *>(p), vreinterpretq_u8_s32(v)); }
    PYFLY_LANES I zero() { return vdupq_n_s32(0); }
    PYFLY_LANES I broadcast(const int32_t * p) { return vld1q_dup_s32(p); }
    PYFLY_LANES I add(I a, I b) { return vaddq_s32(a, b); }
    PYFLY_LANES I or_bits(I a, I b) { return vorrq_s32(a, b); }
    PYFLY_LANES I and_bytes(I a, int byte) {
        return vreinterpretq_s32_u8(vandq_u8(vreinterpretq_u8_s32(a), vdupq_n_u8(static_cast<uint8_t>(byte))));
    }
    PYFLY_LANES I flip_sign(I a) { return vreinterpretq_s32_u8(veorq_u8(vreinterpretq_u8_s32(a), vdupq_n_u8(128))); }
    PYFLY_LANES I shift_right_16(I a, int n) { // by a register, to the left
        return vreinterpretq_s32_u16(vshlq_u16(vreinterpretq_u16_s32(a), vdupq_n_s16(static_cast<int16_t>(-n))));
    }
    PYFLY_LANES I shift_left_32(I a, int n) { return vshlq_s32(a, vdupq_n_s32(n)); }
    PYFLY_LANES I look_up(const int8_t * table, int offset, I q) {
        const int8x16_t row = vaddq_s8(vld1q_s8(table), vdupq_n_s8(static_cast<int8_t>(offset)));
        return vreinterpretq_s32_s8(vqtbl1q_s8(row, vreinterpretq_u8_s32(q)));
    }
    template <bool is_signed> PYFLY_LANES I load_pairs(const uint8_t * p) {
        const uint8x8_t bytes = vld1_u8(p);
        return is_signed ? vreinterpretq_s32_s16(vmovl_s8(vreinterpret_s8_u8(bytes)))
                         : vreinterpretq_s32_u16(vmovl_u8(bytes));
    }
    PYFLY_LANES I dot_pairs(I sum, I a, I b) {
        const int16x8_t pairs = vreinterpretq_s16_s32(a), own = vreinterpretq_s16_s32(b);
        return add(sum, vpaddq_s32(vmull_s16(vget_low_s16(pairs), vget_low_s16(own)), vmull_high_s16(pairs, own)));
    }

    PYFLY_LANES F zero_float() { return vdupq_n_f32(0.0f); }
    PYFLY_LANES F load_float(const float * p) { return vld1q_f32(p); }
    PYFLY_LANES void store(float * p, F v) { vst1q_f32(p, v); }
    PYFLY_LANES F to_float(I a) { return vcvtq_f32_s32(a); }
    PYFLY_LANES F multiply(F a, F b) { return vmulq_f32(a, b); }
    PYFLY_LANES F add_floats(F a, F b) { return vaddq_f32(a, b); }
    PYFLY_LANES F multiply_add(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    PYFLY_LANES F multiply_subtract(F a, F b, F c) { return vfmsq_f32(c, a, b); }
    PYFLY_LANES F broadcast_float(const int32_t * p) { return vreinterpretq_f32_s32(broadcast(p)); }
    PYFLY_LANES F from_halves(const uint8_t * p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
    PYFLY_LANES F from_bfloats(const uint8_t * p) {
        return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
    }
    PYFLY_LANES F from_exponents(const uint8_t * p) {
        uint32_t four;
        std::memcpy(&four, p, sizeof(four));
        const uint16x4_t e = vget_low_u16(vmovl_u8(vcreate_u8(four)));
        return vmulq_n_f32(vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(e), 23)), 0.5f);
    }
};

} // namespace
} // namespace PYFLY_KERNELS_LEVEL
} // namespace pyfly::kernels
