// The two passes over a logits row, written once in compiler vectors and compiled once for each instruction set:
// every rows_<level>.cpp sets PYFLY_ROWS_LEVEL and its compile flags, and includes this file. GCC and Clang lower the
// 16-lane vectors to whatever the target has (one AVX-512, two AVX2, four SSE2 or NEON registers).
//
// No fast-math: infinities and NaN are values here. No templates of the standard library either: they would be emitted
// with this file's instruction set, and the linker may keep that copy for code that has to run on older processors.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "rows_kernels.h"

namespace pyfly {
namespace PYFLY_ROWS_LEVEL {

namespace {

constexpr size_t lanes = 16;

typedef float vfloat __attribute__((vector_size(lanes * sizeof(float))));
typedef int32_t vint __attribute__((vector_size(lanes * sizeof(int32_t))));

inline vfloat load(const float * p) {
    vfloat v;
    std::memcpy(&v, p, sizeof(v));
    return v;
}

inline vfloat broadcast(float x) {
    return vfloat{} + x;
}

// exp(x) for x in [-87, 0]: split x = n ln 2 + r with |r| <= ln 2 / 2, a degree-5 polynomial for exp(r) (least squares,
// relative error 1.4e-7), and n added to the exponent bits. Adding 1.5 * 2^23 rounds to the nearest integer and leaves
// it in the low bits. One float of ln 2 is enough: where n is large, exp(x) is far too small for its error to matter.
inline vfloat exp_nonpositive(vfloat x) {
    const vfloat magic = broadcast(12582912.0f);
    const vfloat shifted = x * 1.44269504f + magic;
    const vfloat r = x - (shifted - magic) * 0.69314718f;
    vfloat poly = broadcast(8.36979e-3f);
    poly = poly * r + 4.190436e-2f;
    poly = poly * r + 0.16666511f;
    poly = poly * r + 0.49999097f;
    poly = poly * (r * r) + (r + 1.0f);
    return (vfloat) ((vint) poly + ((vint) shifted << 23));
}

inline float horizontal_max(vfloat v) {
    float out = v[0];
    for (size_t i = 1; i < lanes; i++) {
        out = v[i] > out ? v[i] : out;
    }
    return out;
}

inline size_t block_end(size_t start, size_t n) {
    return n - start < block_size ? n : start + block_size;
}

} // namespace

bool block_maxima(const float * row, size_t n, float * maxima) {
    vint nan = vint{};
    bool nan_tail = false;
    for (size_t start = 0, block = 0; start < n; start += block_size, block++) {
        const size_t end = block_end(start, n);
        size_t i = start;
        float best = -__builtin_inff();
        if (end - start >= 4 * lanes) {
            vfloat m0 = load(row + i), m1 = load(row + i + lanes), m2 = load(row + i + 2 * lanes),
                   m3 = load(row + i + 3 * lanes);
            nan |= (m0 != m0) | (m1 != m1) | (m2 != m2) | (m3 != m3);
            for (i += 4 * lanes; i + 4 * lanes <= end; i += 4 * lanes) {
                const vfloat a = load(row + i), b = load(row + i + lanes), c = load(row + i + 2 * lanes),
                             d = load(row + i + 3 * lanes);
                nan |= (a != a) | (b != b) | (c != c) | (d != d);
                m0 = a > m0 ? a : m0;
                m1 = b > m1 ? b : m1;
                m2 = c > m2 ? c : m2;
                m3 = d > m3 ? d : m3;
            }
            m0 = m1 > m0 ? m1 : m0;
            m2 = m3 > m2 ? m3 : m2;
            best = horizontal_max(m2 > m0 ? m2 : m0);
        }
        for (; i < end; i++) {
            nan_tail |= row[i] != row[i];
            best = row[i] > best ? row[i] : best;
        }
        maxima[block] = best;
    }
    int32_t any = nan_tail ? 1 : 0;
    for (size_t i = 0; i < lanes; i++) {
        any |= nan[i];
    }
    return any == 0;
}

ExpSums exp_sums(const float * row, size_t n, float max) {
    ExpSums sums = {0.0, 0.0};
    const vfloat vmax = broadcast(max);
    const vfloat floor = broadcast(-87.0f);
    // Lanes are flushed to double every block, so that the error does not grow with the vocabulary.
    for (size_t start = 0; start < n; start += block_size) {
        const size_t end = block_end(start, n);
        vfloat e0 = vfloat{}, e1 = vfloat{}, x0 = vfloat{}, x1 = vfloat{};
        size_t i = start;
        for (; i + 2 * lanes <= end; i += 2 * lanes) {
            // Under the floor exp is below 2e-38: nothing beside the maximum's 1. It also keeps -inf out of the
            // product.
            const vfloat da = load(row + i) - vmax, db = load(row + i + lanes) - vmax;
            const vfloat ca = da > floor ? da : floor, cb = db > floor ? db : floor;
            const vfloat ea = exp_nonpositive(ca), eb = exp_nonpositive(cb);
            e0 += ea;
            e1 += eb;
            x0 += ea * ca;
            x1 += eb * cb;
        }
        e0 += e1;
        x0 += x1;
        for (; i < end; i += lanes) {
            vfloat rest = broadcast(-__builtin_inff());
            for (size_t lane = 0; lane < lanes && i + lane < end; lane++) {
                rest[lane] = row[i + lane];
            }
            const vfloat d = rest - vmax;
            const vfloat c = d > floor ? d : floor;
            const vfloat e = exp_nonpositive(c);
            e0 += e;
            x0 += e * c;
        }
        for (size_t lane = 0; lane < lanes; lane++) {
            sums.exp += e0[lane];
            sums.exp_times_x += x0[lane];
        }
    }
    return sums;
}

} // namespace PYFLY_ROWS_LEVEL
} // namespace pyfly
