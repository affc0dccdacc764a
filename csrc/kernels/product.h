// The products, written once for all types and instruction sets. Every product_<level>.cpp includes simd_<level>.h,
// which defines `Simd`, and then this file, and is compiled for its instruction set.
//
// Activations come quantised to signed bytes, d * q with |q| <= 127: one d for each block of the weights' type (as in
// ggml's Q8_K and Q8_0). A block's dot products are sums of integers, and blocks are added in their order by one fused
// multiplication each. So a row's result is the same bits whatever the number of rows, threads and panels, and the same
// on every instruction set.
//
// No templates of the standard library: they would be emitted with this file's instruction set, and the linker may keep
// that copy for code that has to run on older processors.

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "for_each_type.h"
#include "layout.h"
#include "products.h"
#include "quantise.h"
#include "weights.h"

namespace pyfly::kernels {
namespace PYFLY_KERNELS_LEVEL {

namespace {

using V = Simd::F; // lanes of float

constexpr int parts = panel / Simd::lanes; // a panel is computed in this many parts
constexpr int part_bytes = vector / parts;

constexpr size_t rows_together = 48;

// ---- Activations ----------------------------------------------------------------------------------------------------

// The unsigned form of a type's weights is multiplied, unless the instruction set prefers the signed one.
template <WeightType type>
constexpr int offset_of = Simd::template prefers_signed<largest<type>()> ? 0 : Format<type>::offset;

// Activations of m rows, a strip, are interleaved by row, so that a product has one pointer with constant offsets. For
// each block of the weights' type: [block / 4][m] quads of bytes; with an offset [block / group][m] words, from
// which the sum of a group starts (Simd::start_of); with minima and groups [n_pairs][m] pairs of int16, the sums of
// groups 2p and 2p + 1; then [m] floats d; with minima and no groups [m] floats, d times the sum. All are four bytes
// wide.
template <WeightType type> struct Strip {
    using F = Format<type>;
    static constexpr int starts = F::block / 4;
    static constexpr int sums = starts + (offset_of<type> != 0 ? F::block / F::group : 0);
    static constexpr int d = sums + (F::has_groups && F::has_mins ? PackedBlock<F>::n_pairs : 0);
    static constexpr int d_sum = d + 1;
    static constexpr int width = d_sum + (F::has_mins && !F::has_groups ? 1 : 0); // words of a block of one row
};

// Whether the sums of two groups are multiplied by their scales at once, which the instruction set has to do and 16
// bits have to hold. G products a second without, and with it: Q2_K 142 to 163 for 8 rows, 138 to 154 for 48, but 96 to
// 78 for one; Q3_K, which has starts as well, 167 to 163 for 8 and 66 to 52 for one (Zen 4, weights in L2).
template <WeightType type> constexpr bool takes_pairs(int m) {
    return Simd::multiplies_pairs && m >= 4 && Format<type>::has_groups && offset_of<type> == 0 &&
           Format<type>::group * 127 * largest<type>() < 32768;
}

template <WeightType type> void quantise(const float * x, size_t n_in, int32_t * strip, int m, int row) {
    using F = Format<type>;
    using S = Strip<type>;
    int8_t q[F::block];
    for (size_t i = 0; i < n_in; i += F::block, strip += S::width * m) {
        const float d = quantise_block<F::block>(x + i, q);
        const auto put = [&](int word, const void * value) { std::memcpy(strip + word * m + row, value, 4); };
        for (int k = 0; k < F::block / 4; k++) {
            put(k, q + 4 * k);
        }
        if constexpr (offset_of<type> != 0) {
            for (int g = 0; g < F::block / F::group; g++) {
                const int32_t start = Simd::template start_of<F::group, offset_of<type>>(q + g * F::group);
                put(S::starts + g, &start);
            }
        }
        put_sums<F, S>(q, d, put);
    }
}

// ---- Weights --------------------------------------------------------------------------------------------------------

// Weights are asked for this many bytes before they are used: a block, and at least 2 KB. Each unit asks for the same
// unit there, and with two parts each part does (one of them alone was slower): a block that asks for all of the next
// one before it begins fills the queue of loads. Measured on Zen 4, two cores, Qwen2.5-Coder-1.5B Q4_K_M, in ms for
// 1, 2, 4, 8 and 11 rows:
//   AVX-512 VNNI, by the unit 23.7, 25.2, 31.5, 58.0, 74.9; by the block 24.8, 31.5, 38.5, 76.2, 94.0;
//     not asked for 22.3, 24.7, 32.2, 55.1 to 67.0, 71.6 to 83.3
//   AVX2, by the unit 30.9, 31.3, 43.6, 83.0, 113; by the block 31.3, 34.3, 57.3, 101, 134;
//     not asked for 23 to 24.7, 29.3, 45 to 52, 93 to 103, 122 to 137
// On Zen 1 one row took 0.76 to 0.9 of its time when asked for by the block, two 0.87 to 0.95. 1 to 8 KB make no
// difference.
//
// In the unpacked way, too, a block asks for the next one while its first strip is multiplied: 16 rows of Q4_K took
// 0.82 of their time, of Q6_K 0.72 (Zen 3).
template <class P> constexpr int prefetched = P::bytes > 2048 ? P::bytes : 2048;

constexpr int dense_prefetched = 2048; // 4 rows of F16 took 0.67 of their time, 16 of them 0.85 (Zen 3)

// The weights of a block: unpacked as they are used, for a few rows; unpacked as they are used and stored for the next
// strips; or those that were stored.
template <WeightType type> struct Packed {
    static constexpr int unit_bytes = unit_vectors<Format<type>> * vector;
    const uint8_t * units;
    PYFLY_INLINE I quad(int part, int u, int i) const {
        return unpack_quad<type, offset_of<type>>(units + u * unit_bytes + part * part_bytes, i);
    }
    PYFLY_INLINE void prefetch_unit(int u) const {
        prefetch(units + u * unit_bytes + prefetched<PackedBlock<Format<type>>>, unit_bytes);
    }
};

constexpr int place_of_quad(int part, int u, int i) { // in an unpacked block
    return (u * unit_quads + i) * vector + part * part_bytes;
}

template <WeightType type> struct Unpacking {
    Packed<type> packed;
    uint8_t * quads;
    PYFLY_INLINE I quad(int part, int u, int i) const {
        const I q = packed.quad(part, u, i);
        Simd::store_bytes(quads + place_of_quad(part, u, i), q);
        return q;
    }
    PYFLY_INLINE void prefetch_unit(int u) const { packed.prefetch_unit(u); }
};

template <WeightType type> struct Unpacked {
    const uint8_t * quads;
    PYFLY_INLINE I quad(int part, int u, int i) const { return Simd::load(quads + place_of_quad(part, u, i)); }
    PYFLY_INLINE void prefetch_unit(int) const {} // they are asked for already
};

// ---- Products -------------------------------------------------------------------------------------------------------

// Adds to sums[n_parts][m] of m rows the products of a block of n_parts parts of a panel, from `first_part` on. `Own`
// is Simd, by a name that is looked up only where takes_pairs() is true.
template <WeightType type, int m, int n_parts, class Weights, class Own = Simd>
PYFLY_INLINE void add_block(const uint8_t * block, Weights weights, const int32_t * strip, int first_part,
                            V (*sums)[m]) {
    using F = Format<type>;
    using P = PackedBlock<F>;
    using S = Strip<type>;
    constexpr int most = largest<type>();
    constexpr bool has_starts = offset_of<type> != 0;
    const auto word = [&](int at, int row) { return strip + at * m + row; };
    const auto own = [&](int part, int at, int bytes) { // the outputs of a part
        return block + at + (first_part + part) * Simd::lanes * bytes;
    };
    I products[n_parts][m];
    for (int part = 0; part < n_parts; part++) {
        for (int c = 0; c < m; c++) {
            products[part][c] = Simd::zero();
        }
    }
    if constexpr (F::has_groups) {
        constexpr int n_quads = F::group / 4;
#pragma GCC unroll 1
        for (int p = 0; p < P::n_pairs; p++) {
            I scales[n_parts];
            for (int part = 0; part < n_parts; part++) {
                scales[part] =
                    Simd::template load_pairs<F::has_signed_scales>(own(part, P::scales + p * P::pair_bytes, 2));
                if constexpr (F::has_short_scales) {
                    scales[part] = Simd::and_bytes(scales[part], 15);
                }
            }
            if constexpr (takes_pairs<type>(m)) {
                const int first = 2 * p * n_quads;
                if (first % unit_quads == 0) {
                    weights.prefetch_unit(first / unit_quads);
                }
                Own::template add_pairs<m, n_parts, n_quads>(
                    products,
                    [&](int part, int i) {
                        return weights.quad(first_part + part, first / unit_quads, first % unit_quads + i);
                    },
                    word(first, 0), scales);
            }
#pragma GCC unroll 2
            for (int h = takes_pairs<type>(m) ? 2 : 0; h < 2; h++) {
                const int group = 2 * p + h, first = group * n_quads;
                if (first % unit_quads == 0) {
                    weights.prefetch_unit(first / unit_quads);
                }
                I own_scales[n_parts];
                for (int part = 0; part < n_parts; part++) {
                    own_scales[part] = Simd::scale_of(scales[part], h);
                }
                Simd::template add_products<m, n_parts, n_quads, most, true, has_starts>(
                    products,
                    [&](int part, int i) {
                        return weights.quad(first_part + part, first / unit_quads, first % unit_quads + i);
                    },
                    word(first, 0), word(S::starts + group, 0), own_scales);
            }
        }
    } else {
        weights.prefetch_unit(0);
        I no_scales[n_parts];
        for (int part = 0; part < n_parts; part++) {
            no_scales[part] = Simd::no_scale();
        }
        Simd::template add_products<m, n_parts, unit_quads, most, false, has_starts>(
            products, [&](int part, int i) { return weights.quad(first_part + part, 0, i); }, word(0, 0),
            word(S::starts, 0), no_scales);
    }
    for (int part = 0; part < n_parts; part++) {
        I mins[P::n_pairs > 0 ? P::n_pairs : 1];
        if constexpr (F::has_mins && F::has_groups) {
#pragma GCC unroll 8
            for (int p = 0; p < P::n_pairs; p++) {
                mins[p] = load_mins<type>(block, p, (first_part + part) * Simd::lanes);
            }
        }
        const V d = F::d_bytes == 1 ? Simd::from_exponents(own(part, P::d, 1)) : Simd::from_halves(own(part, P::d, 2));
        for (int c = 0; c < m; c++) {
            V & sum = sums[part][c];
            const V row_d = Simd::broadcast_float(word(S::d, c));
            sum = Simd::multiply_add(Simd::to_float(products[part][c]), Simd::multiply(d, row_d), sum);
            if constexpr (F::has_mins && F::has_groups) {
                const V min = Simd::multiply(Simd::from_halves(own(part, P::m, 2)), row_d);
                I from_mins = Simd::zero();
#pragma GCC unroll 8
                for (int p = 0; p < P::n_pairs; p++) {
                    from_mins = Simd::dot_pairs(from_mins, mins[p], Simd::broadcast(word(S::sums + p, c)));
                }
                sum = Simd::multiply_subtract(Simd::to_float(from_mins), min, sum);
            } else if constexpr (F::has_mins) {
                sum = Simd::multiply_subtract(Simd::from_halves(own(part, P::m, 2)),
                                              Simd::broadcast_float(word(S::d_sum, c)), sum);
            }
        }
    }
}

// A panel times m rows, unpacked as it goes: out[m][at..at + 15].
template <WeightType type, int m>
void multiply_strip(const uint8_t * weights, size_t n_in, const int32_t * strip, float * const * out, size_t at) {
    using F = Format<type>;
    using P = PackedBlock<F>;
    constexpr int n_parts = Simd::parts_together;
    V sums[parts][m];
    for (int part = 0; part < parts; part++) {
        for (int c = 0; c < m; c++) {
            sums[part][c] = Simd::zero_float();
        }
    }
    for (size_t i = 0; i < n_in; i += F::block, weights += P::bytes, strip += Strip<type>::width * m) {
        prefetch(weights + prefetched<P>, P::units);
        for (int part = 0; part < parts; part += n_parts) {
            add_block<type, m, n_parts>(weights, Packed<type>{weights + P::units}, strip, part, sums + part);
        }
    }
    for (int part = 0; part < parts; part++) {
        for (int c = 0; c < m; c++) {
            Simd::store(out[c] + at + part * Simd::lanes, sums[part][c]);
        }
    }
}

// A block of a panel times m rows; sums[m][16] are read and written.
template <WeightType type, class Weights, int m>
void add_to_sums(float * sums, const uint8_t * block, Weights weights, const int32_t * strip) {
    constexpr int n_parts = Simd::parts_together;
    for (int first_part = 0; first_part < parts; first_part += n_parts) {
        V own[n_parts][m];
        for (int part = 0; part < n_parts; part++) {
            for (int c = 0; c < m; c++) {
                own[part][c] = Simd::load_float(sums + c * panel + (first_part + part) * Simd::lanes);
            }
        }
        add_block<type, m, n_parts>(block, weights, strip, first_part, own);
        for (int part = 0; part < n_parts; part++) {
            for (int c = 0; c < m; c++) {
                Simd::store(sums + c * panel + (first_part + part) * Simd::lanes, own[part][c]);
            }
        }
    }
}

// Chosen by the number of rows of a strip. More rows than one has are never asked for: nothing is made for them.
template <int m, size_t most> constexpr int at_most = m < static_cast<int>(most) ? m : static_cast<int>(most);
template <int m> constexpr int rows = at_most<m, Simd::strip_rows>;

template <WeightType type>
constexpr decltype(&multiply_strip<type, 1>) strips[] = {multiply_strip<type, 1>,       multiply_strip<type, rows<2>>,
                                                         multiply_strip<type, rows<3>>, multiply_strip<type, rows<4>>,
                                                         multiply_strip<type, rows<5>>, multiply_strip<type, rows<6>>,
                                                         multiply_strip<type, rows<7>>, multiply_strip<type, rows<8>>};

template <WeightType type, int m> constexpr auto add_unpacked = add_to_sums<type, Unpacked<type>, m>;

template <WeightType type>
constexpr decltype(&add_to_sums<type, Unpacked<type>, 1>) unpacked_strips[] = {
    add_unpacked<type, 1>,       add_unpacked<type, rows<2>>, add_unpacked<type, rows<3>>, add_unpacked<type, rows<4>>,
    add_unpacked<type, rows<5>>, add_unpacked<type, rows<6>>, add_unpacked<type, rows<7>>, add_unpacked<type, rows<8>>};

template <WeightType type>
void multiply_panel(const uint8_t * weights, size_t n_in, const int32_t * rows, size_t n_rows, float * const * out,
                    size_t at) {
    using F = Format<type>;
    using P = PackedBlock<F>;
    using S = Strip<type>;
    const size_t n_blocks = n_in / F::block;
    if (n_rows <= Simd::worth_unpacking) {
        for (size_t first = 0; first < n_rows; first += Simd::strip_rows) {
            const size_t m = n_rows - first < Simd::strip_rows ? n_rows - first : Simd::strip_rows;
            strips<type>[m - 1](weights, n_in, rows + first * n_blocks * S::width, out + first, at);
        }
        return;
    }
    alignas(64) uint8_t quads[F::block / 4 * vector];
    alignas(64) float sums[rows_together * panel];
    std::memset(sums, 0, n_rows * panel * sizeof(float));
    for (size_t b = 0; b < n_blocks; b++) {
        const uint8_t * block = weights + b * P::bytes;
        prefetch(block + prefetched<P>, P::units);
        // The first strip unpacks: in a loop of its own, unpacking waits for stores. 8 rows of Q4_K and Q4_0 took 0.9
        // of their time (Zen 4, AVX2, weights in L2).
        constexpr int n_first = Simd::strip_rows;
        static_assert(Simd::strip_rows <= Simd::worth_unpacking, "the first strip has all its rows");
        add_to_sums<type, Unpacking<type>, n_first>(sums, block, {{block + P::units}, quads},
                                                    rows + b * n_first * S::width);
        for (size_t first = Simd::strip_rows; first < n_rows; first += Simd::strip_rows) {
            const size_t m = n_rows - first < Simd::strip_rows ? n_rows - first : Simd::strip_rows;
            const int32_t * strip = rows + (first * n_blocks + b * m) * S::width;
            unpacked_strips<type>[m - 1](sums + first * panel, block, {quads}, strip);
        }
    }
    for (size_t c = 0; c < n_rows; c++) {
        std::memcpy(out[c] + at, sums + c * panel, panel * sizeof(float));
    }
}

template <WeightType type>
void multiply(const uint8_t * panels, size_t n_panels, size_t n_in, const int32_t * rows, size_t n_rows,
              float * const * out) {
    const size_t bytes = n_in / Format<type>::block * PackedBlock<Format<type>>::bytes;
    for (size_t p = 0; p < n_panels; p++) {
        multiply_panel<type>(panels + p * bytes, n_in, rows, n_rows, out, p * panel);
    }
}

// ---- Weights that are floats ----------------------------------------------------------------------------------------

// Four sums of every fourth input, added at the end: one alone would wait for itself. A block of inputs is multiplied
// for as many of them at a time as fit in the registers.
constexpr int n_chains = 4;

template <WeightType type> PYFLY_INLINE V load_dense(const uint8_t * weights) {
    if constexpr (type == WeightType::f32) {
        return Simd::load_float(reinterpret_cast<const float *>(weights));
    } else if constexpr (type == WeightType::f16) {
        return Simd::from_halves(weights);
    } else {
        return Simd::from_bfloats(weights);
    }
}

// How many chains these are for m rows.
constexpr int chains_together(int m) {
    const int most = Simd::dense_sums / (parts * m);
    return most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

// own[n_own][parts][m] += the products of inputs begin..end - 1 of chains first..first + n_own - 1. Every loop is
// unrolled here: GCC 12 else keeps the sums in memory, and 4 rows of F16 ran at half the speed of 2 (Zen 4, AVX-512).
template <WeightType type, int m, int n_own>
PYFLY_INLINE void add_dense(const uint8_t * weights, const int32_t * strip, size_t begin, size_t end, int first,
                            V (&own)[n_own][parts][m]) {
    constexpr int step_bytes = n_chains * panel * static_cast<int>(dense_width(type));
    for (size_t i = begin + static_cast<size_t>(first); i < end; i += n_chains) {
        if (first == 0) {
            prefetch(weights + i * panel * dense_width(type) + dense_prefetched, step_bytes);
        }
#pragma GCC unroll 4
        for (size_t k = 0; k < n_own; k++) {
            const uint8_t * at = weights + (i + k) * panel * dense_width(type);
            V w[parts];
#pragma GCC unroll 4
            for (int part = 0; part < parts; part++) {
                w[part] = load_dense<type>(at + static_cast<size_t>(part * Simd::lanes) * dense_width(type));
            }
#pragma GCC unroll 8
            for (int c = 0; c < m; c++) {
                const V x = Simd::broadcast_float(strip + (i + k) * m + c);
#pragma GCC unroll 4
                for (int part = 0; part < parts; part++) {
                    own[k][part][c] = Simd::multiply_add(w[part], x, own[k][part][c]);
                }
            }
        }
    }
}

template <WeightType type, int m>
void multiply_dense_strip(const uint8_t * weights, size_t n_in, const int32_t * strip, float * const * out, size_t at) {
    constexpr int n_own = chains_together(m);
    V sums[n_chains][parts][m];
#pragma GCC unroll 4
    for (int k = 0; k < n_chains; k++) {
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++) {
#pragma GCC unroll 8
            for (int c = 0; c < m; c++) {
                sums[k][part][c] = Simd::zero_float();
            }
        }
    }
    if constexpr (n_own == n_chains) {
        add_dense<type, m, n_chains>(weights, strip, 0, n_in, 0, sums);
    } else {
        for (size_t begin = 0; begin < n_in; begin += dense_block) {
#pragma GCC unroll 4
            for (int first = 0; first < n_chains; first += n_own) {
                V own[n_own][parts][m];
                for (int k = 0; k < n_own; k++) {
                    for (int part = 0; part < parts; part++) {
                        for (int c = 0; c < m; c++) {
                            own[k][part][c] = sums[first + k][part][c];
                        }
                    }
                }
                add_dense<type, m, n_own>(weights, strip, begin, begin + dense_block, first, own);
                for (int k = 0; k < n_own; k++) {
                    for (int part = 0; part < parts; part++) {
                        for (int c = 0; c < m; c++) {
                            sums[first + k][part][c] = own[k][part][c];
                        }
                    }
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int part = 0; part < parts; part++) {
#pragma GCC unroll 8
        for (int c = 0; c < m; c++) {
            Simd::store(out[c] + at + part * Simd::lanes,
                        Simd::add_floats(Simd::add_floats(sums[0][part][c], sums[1][part][c]),
                                         Simd::add_floats(sums[2][part][c], sums[3][part][c])));
        }
    }
}

template <int m> constexpr int dense_rows = at_most<m, Simd::dense_strip_rows>;

template <WeightType type>
constexpr decltype(&multiply_dense_strip<type, 1>) dense_strips[] = {multiply_dense_strip<type, 1>,
                                                                     multiply_dense_strip<type, dense_rows<2>>,
                                                                     multiply_dense_strip<type, dense_rows<3>>,
                                                                     multiply_dense_strip<type, dense_rows<4>>,
                                                                     multiply_dense_strip<type, dense_rows<5>>,
                                                                     multiply_dense_strip<type, dense_rows<6>>};

template <WeightType type>
void multiply_dense(const uint8_t * panels, size_t n_panels, size_t n_in, const int32_t * rows, size_t n_rows,
                    float * const * out) {
    const size_t bytes = n_in * panel * dense_width(type);
    for (size_t p = 0; p < n_panels; p++) {
        for (size_t first = 0; first < n_rows; first += Simd::dense_strip_rows) {
            const size_t m = n_rows - first < Simd::dense_strip_rows ? n_rows - first : Simd::dense_strip_rows;
            dense_strips<type>[m - 1](panels + p * bytes, n_in, rows + first * n_in, out + first, p * panel);
        }
    }
}

void interleave(const float * x, size_t n_in, int32_t * strip, int m, int row) {
    for (size_t i = 0; i < n_in; i++) {
        std::memcpy(strip + i * static_cast<size_t>(m) + row, x + i, 4);
    }
}

template <WeightType type> constexpr size_t words(size_t n_in) {
    return n_in / Format<type>::block * Strip<type>::width;
}

constexpr size_t dense_words(size_t n_in) {
    return n_in;
}

} // namespace

const Products * products(WeightType type) {
    switch (type) {
#define PYFLY_PRODUCTS(name)                                                                                           \
    case WeightType::name: {                                                                                           \
        static const Products all = {Simd::strip_rows, rows_together, words<WeightType::name>,                         \
                                     quantise<WeightType::name>, multiply<WeightType::name>};                          \
        return &all;                                                                                                   \
    }
        PYFLY_FOR_EACH_FORMAT(PYFLY_PRODUCTS)
#undef PYFLY_PRODUCTS
#define PYFLY_DENSE(name)                                                                                              \
    case WeightType::name: {                                                                                           \
        static const Products all = {Simd::dense_strip_rows, rows_together, dense_words, interleave,                   \
                                     multiply_dense<WeightType::name>};                                                \
        return &all;                                                                                                   \
    }
        PYFLY_DENSE(f32)
        PYFLY_DENSE(f16)
        PYFLY_DENSE(bf16)
#undef PYFLY_DENSE
    }
    return nullptr;
}

} // namespace PYFLY_KERNELS_LEVEL
} // namespace pyfly::kernels
