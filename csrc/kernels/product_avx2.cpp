#define PYFLY_KERNELS_LEVEL avx2
#include "simd_256.h"

namespace pyfly::kernels {
namespace avx2 {
namespace {

// Products of unsigned and signed bytes are added in pairs to 16 bits, and pairs of those to 32 bits, with the scale.
struct Simd : Lanes256 {
    // Strips of eight rows, one part at a time, read the weights from memory once for eight rows as well; but prompts
    // took 1.1 times as long (Zen 3).
    static constexpr size_t strip_rows = 4, dense_strip_rows = 6, worth_unpacking = 4;
    static constexpr int dense_sums = 12;    // registers for them
    static constexpr int parts_together = 2; // they share the broadcasts: 4 rows took 0.7 to 0.95 of their time

    // Products of large unsigned bytes do not fit in 16 bits; those of magnitudes do.
    template <int most> static constexpr bool prefers_signed = most > 128;
    static constexpr bool multiplies_pairs = false; // but those of one group, by its scale twice

    PYFLY_LANES I no_scale() { return _mm256_set1_epi16(1); }

    // The scale of group h of each pair, twice.
    PYFLY_LANES I scale_of(I pairs, int h) {
        const I first = _mm256_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13, 0, 1, 0, 1, 4, 5, 4, 5, 8,
                                         9, 8, 9, 12, 13, 12, 13);
        return _mm256_shuffle_epi8(pairs, h == 0 ? first : _mm256_add_epi8(first, _mm256_set1_epi8(2)));
    }

    // The negated amount by which the products of unsigned weights with q[n] exceed those of the signed ones: for the
    // two bytes of each quad that are added in the lower 16 bits, and for the two others. It is right only if the sum
    // of the signed ones fits in 16 bits.
    template <int n, int offset> PYFLY_LANES int32_t start_of(const int8_t * q) {
        static_assert(n / 2 * 127 * offset < 32768, "n / 2 products of a weight, at least -offset, and a byte");
        int16_t pair[2] = {0, 0};
        for (int i = 0; i < n; i++) {
            pair[i / 2 % 2] = static_cast<int16_t>(pair[i / 2 % 2] - offset * q[i]);
        }
        int32_t start;
        std::memcpy(&start, pair, sizeof(start));
        return start;
    }

    // Adds the products of n_quads quads of each part with m rows, times its scale (no_scale() unless is_scaled); of
    // the signed weights if has_starts. strip[n_quads][m]; starts[m]; weights are at most `most`, unsigned.
    //
    // Sums of unsigned weights fit in 16 bits for few quads only. Those of the signed weights fit for all of a group,
    // and additions wrap around: a sum that starts from start_of() is right in the end, whatever it was in between.
    template <int m, int n_parts, int n_quads, int most, bool is_scaled, bool has_starts, class Quad>
    PYFLY_LANES void add_products(I (*sums)[m], Quad quad, const int32_t * strip, const int32_t * starts,
                                  const I * scales) {
        constexpr int n_fitting = prefers_signed<most> ? 1 : 32767 / (2 * 127 * most);
        constexpr int n_chain = has_starts || n_fitting > n_quads ? n_quads : n_fitting;
        I chain[n_parts][m];
#pragma GCC unroll 8
        for (int i = 0; i < n_quads; i++) {
            I q[n_parts], magnitude[n_parts];
#pragma GCC unroll 2
            for (int part = 0; part < n_parts; part++) {
                q[part] = quad(part, i);
                magnitude[part] = prefers_signed<most> ? _mm256_abs_epi8(q[part]) : q[part];
            }
#pragma GCC unroll 8
            for (int c = 0; c < m; c++) {
                const I a = broadcast(strip + i * m + c);
#pragma GCC unroll 2
                for (int part = 0; part < n_parts; part++) {
                    const I product =
                        _mm256_maddubs_epi16(magnitude[part], prefers_signed<most> ? _mm256_sign_epi8(a, q[part]) : a);
                    if (i % n_chain != 0) {
                        chain[part][c] = _mm256_add_epi16(chain[part][c], product);
                    } else {
                        chain[part][c] = has_starts ? _mm256_add_epi16(broadcast(starts + c), product) : product;
                    }
                    if ((i + 1) % n_chain == 0 || i + 1 == n_quads) {
                        sums[part][c] = add(sums[part][c], _mm256_madd_epi16(chain[part][c], scales[part]));
                    }
                }
            }
        }
    }
};

} // namespace
} // namespace avx2
} // namespace pyfly::kernels

#include "product.h"
