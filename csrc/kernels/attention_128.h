// What attention needs of vectors of eight lanes, in two of four. See attention_256.h and simd_256.h for what the
// functions are; sums are added in the same order.
#include "large_weights.h"
#include "simd_128.h"

namespace pyfly::kernels {
namespace PYFLY_KERNELS_LEVEL {
namespace {

struct Eight {
    struct I {
        int32x4_t low, high;
    };
    struct F {
        float32x4_t low, high;
    };
    static constexpr int lanes = 8;
    static constexpr int queries_together = 3;

    PYFLY_LANES F zero_float() { return fill(0.0f); }
    PYFLY_LANES F fill(float value) { return {vdupq_n_f32(value), vdupq_n_f32(value)}; }
    PYFLY_LANES F load_float(const float * p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
    PYFLY_LANES void store(float * p, F v) {
        vst1q_f32(p, v.low);
        vst1q_f32(p + 4, v.high);
    }
    PYFLY_LANES F to_float(I a) { return {vcvtq_f32_s32(a.low), vcvtq_f32_s32(a.high)}; }
    PYFLY_LANES F multiply(F a, F b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
    PYFLY_LANES F add_floats(F a, F b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
    PYFLY_LANES F subtract_floats(F a, F b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
    PYFLY_LANES F multiply_add(F a, F b, F c) {
        return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
    }
    PYFLY_LANES F multiply_subtract(F a, F b, F c) {
        return {vfmsq_f32(c.low, a.low, b.low), vfmsq_f32(c.high, a.high, b.high)};
    }
    PYFLY_LANES F from_halves(const uint8_t * p) { return {Lanes128::from_halves(p), Lanes128::from_halves(p + 8)}; }
    PYFLY_LANES F from_bfloats(const uint8_t * p) { return {Lanes128::from_bfloats(p), Lanes128::from_bfloats(p + 8)}; }
    PYFLY_LANES F fill_with_half(const uint8_t * p) {
        uint16_t half;
        std::memcpy(&half, p, sizeof(half));
        const float32x4_t four = vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(half)));
        return {four, four};
    }
    PYFLY_LANES I from_words(int16x8_t v) { return {vmovl_s16(vget_low_s16(v)), vmovl_high_s16(v)}; }
    PYFLY_LANES I from_bytes(const uint8_t * p) { return from_words(vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)))); }
    PYFLY_LANES I from_nibbles(const uint8_t * p, bool is_upper) {
        const uint8x8_t bytes = vld1_u8(p), nibbles = is_upper ? vshr_n_u8(bytes, 4) : vand_u8(bytes, vdup_n_u8(15));
        return from_words(vmovl_s8(vsub_s8(vreinterpret_s8_u8(nibbles), vdup_n_s8(8))));
    }

    PYFLY_LANES F numbers(const float * p) { return load_float(p); }
    PYFLY_LANES F numbers(const uint16_t * p) { return from_halves(reinterpret_cast<const uint8_t *>(p)); }

    PYFLY_LANES F repeat_eight(const float * p) { return load_float(p); }
    PYFLY_LANES F join(const F * eights) { return eights[0]; }

    PYFLY_LANES void store_sums_of_eights(float * out, const F * v) {
        const auto sums = [](float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {
            return vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d));
        };
        vst1q_f32(out, vaddq_f32(sums(v[0].low, v[1].low, v[2].low, v[3].low),
                                 sums(v[0].high, v[1].high, v[2].high, v[3].high)));
    }

    PYFLY_LANES F larger(F a, F b) {
        return {vbslq_f32(vcgtq_f32(a.low, b.low), a.low, b.low), vbslq_f32(vcgtq_f32(a.high, b.high), a.high, b.high)};
    }
    PYFLY_LANES float largest_lane(F v) { return vmaxnmvq_f32(vmaxnmq_f32(v.low, v.high)); }

    PYFLY_LANES F equal_or(F a, F value, F other) {
        return {vbslq_f32(vceqq_f32(a.low, value.low), value.low, other.low),
                vbslq_f32(vceqq_f32(a.high, value.high), value.high, other.high)};
    }
    PYFLY_LANES F zero_below(F v, F least, F value) {
        const auto kept = [](float32x4_t own, uint32x4_t is_below) {
            return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(own), is_below));
        };
        return {kept(value.low, vcltq_f32(v.low, least.low)), kept(value.high, vcltq_f32(v.high, least.high))};
    }
    PYFLY_LANES F round(F v) { return {vrndnq_f32(v.low), vrndnq_f32(v.high)}; }
    PYFLY_LANES F power_of_two(F n) {
        const auto power = [](float32x4_t of) {
            return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(of), vdupq_n_s32(127)), 23));
        };
        return {power(n.low), power(n.high)};
    }

    using Sum = uint64x2_t;
    PYFLY_LANES Sum zero_sum() { return vdupq_n_u64(0); }
    PYFLY_LANES Sum add_rounded(Sum sum, F weights) {
        const auto rounded = [](float32x4_t four) {
            const float64x2_t large = vdupq_n_f64(large_weight);
            const float64x2_t low = vaddq_f64(vcvt_f64_f32(vget_low_f32(four)), large);
            const float64x2_t high = vaddq_f64(vcvt_high_f64_f32(four), large);
            return vaddq_u64(vreinterpretq_u64_f64(low), vreinterpretq_u64_f64(high));
        };
        return vaddq_u64(sum, vaddq_u64(rounded(weights.low), rounded(weights.high)));
    }
    PYFLY_LANES int64_t total(Sum sum, int n) { return without_large(vaddvq_u64(sum), n); }
};

} // namespace
} // namespace PYFLY_KERNELS_LEVEL
} // namespace pyfly::kernels
