// Products of many rows with AMX: the bits of those without it (product.h), as all sums of a block are exact int32.
//
// A tile of weights is 64 inputs of 16 outputs, which is how 16 quads lie (layout.h), and a tile of activations is 16
// rows of 64 inputs. With scales of groups the weights of a block are multiplied by them while they are unpacked, and
// products that do not fit in a byte are cut in two, each part with tiles of its own: planes.
#define PYFLY_KERNELS_LEVEL amx
#include "simd_512.h"

namespace pyfly::kernels {
namespace amx {
namespace {

using Simd = Lanes512;

} // namespace
} // namespace amx
} // namespace pyfly::kernels

#include <cstring>

#include "for_each_type.h"
#include "products.h"
#include "quantise.h"
#include "tiles.h"
#include "weights.h"

namespace pyfly::kernels {
namespace amx {
namespace {

using V = Simd::F; // lanes of float

constexpr int rows_of_strip = tile_rows, tile_inputs = 64;

// Unpacked weights serve so many: a prompt of 512 took 0.97 of the time with 96, and 256 were not better.
constexpr size_t rows_together = 128;
static_assert(rows_together <= most_rows && rows_together % rows_of_strip == 0 && read_behind >= tile_bytes, "");

// From so many rows on tiles are faster than AVX-512 VNNI, with weights in a core's cache. Without groups 24 rows took
// 0.86 to 0.92 of the time, and 17 rows 1.0 to 1.28. With groups 9 rows took 0.63 to 0.92 (but IQ4_XS 1.17, and 0.97
// for 12), and 8 rows 0.75 to 1.21 (all but IQ4_XS, 1.52).
template <WeightType type> constexpr size_t worth_tiles = Format<type>::has_groups ? 9 : 24;

// ---- Activations ----------------------------------------------------------------------------------------------------

// Scaled weights of Q3_K, -124 to 128, fit in an unsigned byte with this added.
template <WeightType type> constexpr int bias = type == WeightType::q3_k ? 125 : 0;

// Activations of m rows. For each block of the weights' type: for each 64 inputs, or fewer if the block has fewer,
// [m] rows of them; then words as in product.h: with minima and groups [n_pairs][m] pairs of int16, the sums of groups
// 2p and 2p + 1; with a bias [m] int32, what has to be added for it; [m] floats d; with minima and no groups [m]
// floats, d times the sum.
template <WeightType type> struct Strip {
    using F = Format<type>;
    static constexpr int tile_width = F::block < tile_inputs ? F::block : tile_inputs; // bytes of a row
    static constexpr int sums = F::block / 4;
    static constexpr int start = sums + (F::has_groups && F::has_mins ? PackedBlock<F>::n_pairs : 0);
    static constexpr int d = start + (bias<type> != 0 ? 1 : 0);
    static constexpr int d_sum = d + 1;
    static constexpr int width = d_sum + (F::has_mins && !F::has_groups ? 1 : 0); // words of a block of one row
};

template <WeightType type> void quantise(const float * x, size_t n_in, int32_t * strip, int m, int row) {
    using F = Format<type>;
    using S = Strip<type>;
    int8_t q[F::block];
    for (size_t i = 0; i < n_in; i += F::block, strip += S::width * m) {
        const float d = quantise_block<F::block>(x + i, q);
        const auto put = [&](int word, const void * value) { std::memcpy(strip + word * m + row, value, 4); };
        for (int at = 0; at < F::block; at += S::tile_width) {
            std::memcpy(reinterpret_cast<int8_t *>(strip) + at * m + row * S::tile_width, q + at, S::tile_width);
        }
        if constexpr (bias<type> != 0) {
            const int32_t start = -bias<type> * Simd::sum_of<F::block>(q);
            put(S::start, &start);
        }
        put_sums<F, S>(q, d, put);
    }
}

// ---- Weights with scales of groups ----------------------------------------------------------------------------------

// How weights times scales become bytes, u being the unsigned form of a weight and s its scale.
enum class Split {
    none,   // (u - offset) * s + bias, one plane
    scale,  // u * (s % 8) and u * (s / 8); all are unsigned
    product // the low and the high byte of (u - offset) * s
};

template <WeightType type>
constexpr Split split = type == WeightType::q2_k || type == WeightType::q3_k   ? Split::none
                        : type == WeightType::q4_k || type == WeightType::q5_k ? Split::scale
                                                                               : Split::product;

// A product is that of plane 0 plus that of plane 1 shifted to the left.
template <WeightType type> constexpr int shift = split<type> == Split::none ? 0 : split<type> == Split::scale ? 3 : 8;

template <WeightType type> constexpr int n_planes = split<type> == Split::none ? 1 : 2;

// The scales of group h of each pair, twice.
PYFLY_INLINE I twice(I pairs, int h) {
    const I low = h == 0 ? _mm512_and_si512(pairs, _mm512_set1_epi32(0xFFFF)) : _mm512_srli_epi32(pairs, 16);
    return _mm512_or_si512(low, h == 0 ? _mm512_slli_epi32(pairs, 16)
                                       : _mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
}

PYFLY_INLINE I multiply_16(I a, I b) {
    return _mm512_mullo_epi16(a, b);
}

// Weights are asked for two blocks before they are used: some with each group that is unpacked, the others with each
// quarter of the strips' sums. When the next block was asked for while one was unpacked, memory was idle while tiles
// were multiplied: 32 rows of Q4_K and Q6_K from memory now take 0.84 and 0.77 of that time.
template <WeightType type> struct Asked {
    using P = PackedBlock<Format<type>>;
    static constexpr int ahead = 2 * P::bytes;
    static constexpr int n_groups = 2 * P::n_pairs;
    static constexpr int lines_of_group = P::bytes < 2 * n_groups * 64 ? 1 : 2;
    static constexpr int with_groups = n_groups * lines_of_group * 64;
    static constexpr int other_lines = (P::bytes - with_groups) / 64;
};

// Writes planes[n_planes][block / 4 quads][64].
template <WeightType type> void unpack_scaled(const uint8_t * block, uint8_t * planes) {
    using F = Format<type>;
    using P = PackedBlock<F>;
    constexpr int n_quads = F::group / 4, unit_bytes = unit_vectors<F> * vector, plane_bytes = F::block * panel;
    constexpr int own_bytes = Asked<type>::lines_of_group * 64;
    const I bytes = _mm512_set1_epi16(0xFF);
#pragma GCC unroll 1
    for (int p = 0; p < P::n_pairs; p++) {
        I pairs = Simd::load_pairs<F::has_signed_scales>(block + P::scales + p * P::pair_bytes);
        if constexpr (F::has_short_scales) {
            pairs = Simd::and_bytes(pairs, 15);
        }
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            const I scale = twice(pairs, h);
            prefetch(block + Asked<type>::ahead + (2 * p + h) * own_bytes, own_bytes);
            const I low = split<type> == Split::scale ? Simd::and_bytes(scale, 7) : scale;
            const I high = Simd::shift_right_16(scale, 3);
            const I even = _mm512_and_si512(scale, bytes), odd = _mm512_slli_epi16(scale, 8);
            const I excess = multiply_16(scale, _mm512_set1_epi16(F::offset));
            const I added = multiply_16(_mm512_sub_epi16(_mm512_set1_epi16(bias<type>), excess),
                                        _mm512_set1_epi16(257)); // to both bytes of a pair
            const int first = (2 * p + h) * n_quads;
#pragma GCC unroll 8
            for (int i = 0; i < n_quads; i++) {
                const I u = unpack_quad<type, F::offset>(block + P::units + first / unit_quads * unit_bytes,
                                                         first % unit_quads + i);
                uint8_t * out = planes + (first + i) * vector;
                if constexpr (split<type> == Split::none) { // two bytes at a time: no product carries into the other
                    const I product = multiply_16(u, scale);
                    _mm512_store_si512(out, F::offset != 0 ? _mm512_add_epi16(product, added) : product);
                } else if constexpr (split<type> == Split::scale) {
                    _mm512_store_si512(out, multiply_16(u, low));
                    _mm512_store_si512(out + plane_bytes, multiply_16(u, high));
                } else {
                    const I a = _mm512_sub_epi16(_mm512_maddubs_epi16(u, even), excess);
                    const I b = _mm512_sub_epi16(_mm512_maddubs_epi16(u, odd), excess);
                    _mm512_store_si512(out, _mm512_ternarylogic_epi32(bytes, a, _mm512_slli_epi16(b, 8), 0xCA));
                    _mm512_store_si512(out + plane_bytes,
                                       _mm512_ternarylogic_epi32(bytes, _mm512_srli_epi16(a, 8), b, 0xCA));
                }
            }
        }
    }
}

// What of a packed block is multiplied behind the tiles.
template <WeightType type> struct Head {
    using F = Format<type>;
    using P = PackedBlock<F>;
    static constexpr int n_mins = F::has_mins ? P::n_pairs : 0;
    V d, m;
    I mins[n_mins + 1];

    PYFLY_INLINE explicit Head(const uint8_t * block) {
        d = m = Simd::from_halves(block + P::d);
        if constexpr (F::has_mins) {
            m = Simd::from_halves(block + P::m);
        }
        for (int p = 0; p < n_mins; p++) {
            mins[p] = load_mins<type>(block, p, 0);
        }
    }

    // Adds to sums[16] the product of row r of a strip, from those of its two tiles.
    PYFLY_INLINE void add(const int32_t * strip, int m_rows, int r, const int32_t * low, const int32_t * high,
                          float * sums) const {
        using S = Strip<type>;
        const auto word = [&](int at) { return strip + at * m_rows + r; };
        I product =
            Simd::add(Simd::load(low + r * panel), Simd::shift_left_32(Simd::load(high + r * panel), shift<type>));
        if constexpr (bias<type> != 0) {
            product = Simd::add(product, Simd::broadcast(word(S::start)));
        }
        const V row_d = Simd::broadcast_float(word(S::d));
        V sum = Simd::multiply_add(Simd::to_float(product), Simd::multiply(d, row_d), Simd::load_float(sums));
        if constexpr (F::has_mins) {
            I from_mins = Simd::zero();
#pragma GCC unroll 8
            for (int p = 0; p < n_mins; p++) {
                from_mins = _mm512_dpwssd_epi32(from_mins, mins[p], Simd::broadcast(word(S::sums + p)));
            }
            sum = Simd::multiply_subtract(Simd::to_float(from_mins), Simd::multiply(m, row_d), sum);
        }
        Simd::store(sums, sum);
    }
};

// A strip of rows at one block, and where its sums are.
struct Rows {
    const int32_t * strip;
    int m;
    float * sums; // [m][16]
};

// The products of one or two strips with a block's planes: two tiles of sums each, for the planes, or, if there is one
// alone, for its halves. `meanwhile(k)` is called between, for k = 0 to 3.
template <WeightType type, bool has_two, class Meanwhile>
PYFLY_INLINE void multiply_planes(const uint8_t * planes, const int32_t * first, int m_first, const int32_t * second,
                                  int m_second, int32_t (*sums)[tile_bytes / 4], Meanwhile meanwhile) {
    constexpr bool is_high_signed = split<type> == Split::product;
    constexpr int plane_bytes = Format<type>::block * panel;
    zero_tile<0>();
    zero_tile<1>();
    if (has_two) {
        zero_tile<2>();
        zero_tile<3>();
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        const auto weights = [&](int plane) { return planes + plane * plane_bytes + k * tile_bytes; };
        load_tile<4, tile_inputs>(first + k * 16 * m_first);
        if (has_two) {
            load_tile<5, tile_inputs>(second + k * 16 * m_second);
        }
        if (n_planes<type> == 2 || k < 2) {
            load_tile<6, vector>(weights(0));
            multiply_tiles<0, 4, 6, false>();
            if (has_two) {
                multiply_tiles<2, 5, 6, false>();
            }
        }
        if (n_planes<type> == 2 || k >= 2) {
            load_tile<7, vector>(weights(n_planes<type> - 1));
            multiply_tiles<1, 4, 7, is_high_signed>();
            if (has_two) {
                multiply_tiles<3, 5, 7, is_high_signed>();
            }
        }
        meanwhile(k);
    }
    store_tile<0>(sums[0]);
    store_tile<1>(sums[1]);
    if (has_two) {
        store_tile<2>(sums[2]);
        store_tile<3>(sums[3]);
    }
}

// A block times n_rows rows, whose strips of this block are `words` apart; sums[n_rows][16] are read and written.
template <WeightType type>
void add_scaled(const uint8_t * block, const int32_t * rows, size_t words_of_strip, size_t b, size_t n_rows,
                float * sums) {
    using S = Strip<type>;
    alignas(64) uint8_t planes[n_planes<type> * Format<type>::block * panel];
    alignas(64) int32_t products[2][4][tile_bytes / 4];
    unpack_scaled<type>(block, planes);
    const Head<type> head(block);
    const auto strip_at = [&](size_t first) {
        const size_t m = n_rows - first < rows_of_strip ? n_rows - first : rows_of_strip;
        return Rows{rows + first / rows_of_strip * words_of_strip + b * m * S::width, static_cast<int>(m),
                    sums + first * panel};
    };
    const auto n_quarters = static_cast<int>((n_rows + 2 * rows_of_strip - 1) / (2 * rows_of_strip) + 1) * 4;
    const uint8_t * asked = block + Asked<type>::ahead + Asked<type>::with_groups;
    const int own_bytes = Asked<type>::other_lines > 0 ? (Asked<type>::other_lines / n_quarters + 1) * 64 : 0;
    Rows before[2] = {{nullptr, 0, nullptr}, {nullptr, 0, nullptr}};
    int turn = 0;
    const auto finish = [&](int k) { // a quarter of the strips before
        prefetch(asked, own_bytes);
        asked += own_bytes;
        const Rows & own = before[k / 2];
        const int32_t(*tiles)[tile_bytes / 4] = products[turn ^ 1] + k / 2 * 2;
        const int begin = k % 2 * (rows_of_strip / 2);
        const auto add = [&](int r, int m) { head.add(own.strip, m, r, tiles[0], tiles[1], own.sums + r * panel); };
        if (own.m == rows_of_strip) { // known to the compiler
#pragma GCC unroll 8
            for (int r = 0; r < rows_of_strip / 2; r++) {
                add(begin + r, rows_of_strip);
            }
        } else {
            for (int r = begin; r < begin + rows_of_strip / 2 && r < own.m; r++) {
                add(r, own.m);
            }
        }
    };
    for (size_t first = 0; first < n_rows; first += 2 * rows_of_strip, turn ^= 1) {
        const Rows a = strip_at(first);
        if (first + rows_of_strip < n_rows) {
            const Rows c = strip_at(first + rows_of_strip);
            multiply_planes<type, true>(planes, a.strip, a.m, c.strip, c.m, products[turn], finish);
            before[1] = c;
        } else {
            multiply_planes<type, false>(planes, a.strip, a.m, nullptr, 0, products[turn], finish);
            before[1] = {nullptr, 0, nullptr};
        }
        before[0] = a;
    }
    for (int k = 0; k < 4; k++) {
        finish(k);
    }
}

// ---- Weights without groups -----------------------------------------------------------------------------------------

// Blocks that are unpacked together, as far as there are so many.
constexpr int blocks_together = 8;

// n blocks times n_rows rows; sums[n_rows][16] are read and written. The blocks behind the next ones are asked for
// while the first strip is multiplied: 32 rows of Q8_0 and Q4_0 from memory took 0.75 and 0.89 of the time that they
// took when all of the next ones were asked for at once.
template <WeightType type, int n>
void add_plain(const uint8_t * blocks, const int32_t * rows, size_t words_of_strip, size_t b, size_t n_rows,
               float * sums) {
    using F = Format<type>;
    using P = PackedBlock<F>;
    using S = Strip<type>;
    constexpr int block_bytes = F::block * panel; // unpacked
    alignas(64) uint8_t weights[n * block_bytes];
    alignas(64) int32_t products[2][n][tile_bytes / 4];
    V d[n], m[n];
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) {
        const uint8_t * block = blocks + i * P::bytes;
        d[i] = F::d_bytes == 1 ? Simd::from_exponents(block + P::d) : Simd::from_halves(block + P::d);
        m[i] = d[i];
        if constexpr (F::has_mins) {
            m[i] = Simd::from_halves(block + P::m);
        }
        for (int k = 0; k < unit_quads; k++) {
            const I q = unpack_quad<type, 0>(block + P::units, k);
            _mm512_store_si512(weights + i * block_bytes + k * vector,
                               F::values == Values::number ? _mm512_sub_epi8(q, _mm512_set1_epi8(F::offset)) : q);
        }
    }
    Rows before = {nullptr, 0, nullptr};
    int turn = 0;
    const auto finish = [&](int begin, int end) {
        const auto add = [&](int r, int m_rows) {
            V sum = Simd::load_float(before.sums + r * panel);
#pragma GCC unroll 8
            for (int i = 0; i < n; i++) {
                const auto word = [&](int at) { return before.strip + (i * S::width + at) * m_rows + r; };
                sum = Simd::multiply_add(Simd::to_float(Simd::load(products[turn ^ 1][i] + r * panel)),
                                         Simd::multiply(d[i], Simd::broadcast_float(word(S::d))), sum);
                if constexpr (F::has_mins) {
                    sum = Simd::multiply_subtract(m[i], Simd::broadcast_float(word(S::d_sum)), sum);
                }
            }
            Simd::store(before.sums + r * panel, sum);
        };
        for (int r = begin; r < end && r < before.m; r++) {
            if (before.m == rows_of_strip) { // known to the compiler
                add(r, rows_of_strip);
            } else {
                add(r, before.m);
            }
        }
    };
    for (size_t first = 0; first < n_rows; first += rows_of_strip, turn ^= 1) {
        const size_t own = n_rows - first < rows_of_strip ? n_rows - first : rows_of_strip;
        const Rows now = {rows + first / rows_of_strip * words_of_strip + b * own * S::width, static_cast<int>(own),
                          sums + first * panel};
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) {
            zero_tile<0>();
            load_tile<4, F::block, tile_rows * F::block>(now.strip + i * S::width * now.m);
            load_tile<6, vector, block_bytes>(weights + i * block_bytes);
            multiply_tiles<0, 4, 6, true>();
            store_tile<0>(products[turn][i]);
            if (first == 0 && n > 1) {
                prefetch(blocks + (2 * n + i) * P::bytes, P::bytes);
            }
            finish(i * (rows_of_strip / n), (i + 1) * (rows_of_strip / n));
        }
        before = now;
    }
    finish(0, rows_of_strip);
}

// ---- Panels ---------------------------------------------------------------------------------------------------------

template <WeightType type> TileShapes shapes_for(size_t n_rows) {
    const auto m = static_cast<uint8_t>(n_rows < tile_rows ? n_rows : tile_rows);
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++) {
        const bool is_of_weights = tile >= 6, is_of_rows = tile == 4 || tile == 5;
        shapes.rows[tile] = is_of_weights ? Strip<type>::tile_width / 4 : m;
        shapes.row_bytes[tile] = is_of_rows ? Strip<type>::tile_width : vector;
    }
    return shapes;
}

// A panel times n_rows rows: sums[n_rows][16].
template <WeightType type>
void multiply_panel(const uint8_t * panel_weights, size_t n_blocks, const int32_t * rows, size_t n_rows, float * sums) {
    using F = Format<type>;
    using P = PackedBlock<F>;
    const size_t words_of_strip = rows_of_strip * n_blocks * Strip<type>::width;
    for (size_t r = 0; r < n_rows; r++) {
        Simd::store(sums + r * panel, Simd::zero_float());
        asm volatile(""); // the compiler would call memset, which took 5 % of the time of a prompt
    }
    size_t b = 0;
    if constexpr (F::has_groups) {
        for (; b < n_blocks; b++) {
            add_scaled<type>(panel_weights + b * P::bytes, rows, words_of_strip, b, n_rows, sums);
        }
    } else {
        for (; b + blocks_together <= n_blocks; b += blocks_together) {
            add_plain<type, blocks_together>(panel_weights + b * P::bytes, rows, words_of_strip, b, n_rows, sums);
        }
        for (; b < n_blocks; b++) {
            add_plain<type, 1>(panel_weights + b * P::bytes, rows, words_of_strip, b, n_rows, sums);
        }
    }
}

// Outputs of a row are written for so many panels at a time, as rows lie in different pages of memory: 96 rows of Q4_K
// took 0.92 of their time with one, and 0.96 with 2 or 8.
constexpr size_t panels_together = 4;

template <WeightType type>
void multiply(const uint8_t * panels, size_t n_panels, size_t n_in, const int32_t * rows, size_t n_rows,
              float * const * out) {
    const size_t n_blocks = n_in / Format<type>::block, panel_bytes = n_blocks * PackedBlock<Format<type>>::bytes;
    alignas(64) float sums[panels_together][rows_together * panel];
    set_tiles(shapes_for<type>(n_rows));
    for (size_t first = 0; first < n_panels; first += panels_together) {
        const size_t n = n_panels - first < panels_together ? n_panels - first : panels_together;
        for (size_t p = 0; p < n; p++) {
            multiply_panel<type>(panels + (first + p) * panel_bytes, n_blocks, rows, n_rows, sums[p]);
        }
        for (size_t r = 0; r < n_rows; r++) {
            for (size_t p = 0; p < n; p++) {
                std::memcpy(out[r] + (first + p) * panel, sums[p] + r * panel, panel * sizeof(float));
            }
        }
    }
    release_tiles();
}

template <WeightType type> size_t words(size_t n_in) {
    return n_in / Format<type>::block * Strip<type>::width;
}

} // namespace

const Products * products(WeightType type, size_t n_rows) {
    switch (type) {
#define PYFLY_PRODUCTS(name)                                                                                           \
    case WeightType::name: {                                                                                           \
        static const Products all = {rows_of_strip, rows_together, words<WeightType::name>,                            \
                                     quantise<WeightType::name>, multiply<WeightType::name>};                          \
        return n_rows >= worth_tiles<WeightType::name> ? &all : nullptr;                                               \
    }
        PYFLY_FOR_EACH_FORMAT(PYFLY_PRODUCTS)
#undef PYFLY_PRODUCTS
        default:
            return nullptr;
    }
}

} // namespace amx
} // namespace pyfly::kernels
