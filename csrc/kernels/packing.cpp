#include "packing.h"

#include <cstring>
#include <vector>

#include "for_each_type.h"

namespace pyfly::kernels {

namespace {

struct Sizes {
    size_t block = 0; // inputs; 0: the type is not known
    size_t row_bytes, panel_bytes;
};

Sizes sizes_of(WeightType type) {
    switch (type) {
#define PYFLY_SIZES(name)                                                                                              \
    case WeightType::name:                                                                                             \
        return {static_cast<size_t>(Format<WeightType::name>::block),                                                  \
                static_cast<size_t>(Format<WeightType::name>::bytes),                                                  \
                static_cast<size_t>(PackedBlock<Format<WeightType::name>>::bytes)};
        PYFLY_FOR_EACH_FORMAT(PYFLY_SIZES)
#undef PYFLY_SIZES
        case WeightType::f32:
        case WeightType::f16:
        case WeightType::bf16:
            return {dense_block, dense_width(type) * dense_block, dense_width(type) * dense_block * panel};
    }
    return {};
}

// Puts parts of `n_bits` bits, from bit `first` on, of the quads of a unit into n_bits vectors.
template <int n_bits> void pack_bits(const uint8_t (*quads)[vector], int first, uint8_t * out) {
    constexpr int n_quads = 8 / n_bits; // in a vector
    for (int v = 0; v < n_bits; v++, out += vector) {
        std::memset(out, 0, vector);
        for (int i = 0; i < n_quads; i++, quads++) {
            for (int j = 0; j < vector; j++) {
                out[j] |= static_cast<uint8_t>((quads[0][j] >> first & ((1u << n_bits) - 1)) << (i * n_bits));
            }
        }
    }
}

// The reverse: adds those bits to the quads.
template <int n_bits> void unpack_bits(const uint8_t * from, int first, uint8_t (*quads)[vector]) {
    constexpr int n_quads = 8 / n_bits;
    for (int v = 0; v < n_bits; v++, from += vector) {
        for (int i = 0; i < n_quads; i++, quads++) {
            for (int j = 0; j < vector; j++) {
                quads[0][j] |= static_cast<uint8_t>((from[j] >> (i * n_bits) & ((1u << n_bits) - 1)) << first);
            }
        }
    }
}

template <WeightType type> void pack(size_t n_in, const uint8_t * rows, uint8_t * out) {
    using F = Format<type>;
    using P = PackedBlock<F>;
    DecodedBlock block;
    uint8_t quads[F::block / 4][vector];
    const size_t n_blocks = n_in / F::block;
    for (size_t b = 0; b < n_blocks; b++, out += P::bytes) {
        for (int lane = 0; lane < panel; lane++) {
            decode_block<type>(rows + (static_cast<size_t>(lane) * n_blocks + b) * F::bytes, block);
            for (int i = 0; i < F::block / 4; i++) {
                std::memcpy(quads[i] + 4 * lane, block.q + 4 * i, 4);
            }
            std::memcpy(out + P::d + F::d_bytes * lane, &block.d, F::d_bytes);
            if (F::has_mins) {
                std::memcpy(out + P::m + 2 * lane, &block.m, 2);
            }
            for (int p = 0; p < P::n_pairs; p++) {
                for (int h = 0; h < 2; h++) {
                    const int at = P::pair_bytes * p + 2 * lane + h;
                    out[P::scales + at] = static_cast<uint8_t>(block.scales[2 * p + h]);
                    if constexpr (F::has_short_scales) {
                        out[P::scales + at] |= static_cast<uint8_t>(block.mins[2 * p + h] << 4);
                    } else if constexpr (F::has_mins) {
                        out[P::mins + at] = block.mins[2 * p + h];
                    }
                }
            }
        }
        for (int u = 0; u < P::n_units; u++) {
            uint8_t * vectors = out + P::units + u * unit_vectors<F> * vector;
            pack_bits<F::low>(quads + u * unit_quads, 0, vectors);
            if constexpr (F::high > 0) {
                pack_bits<F::high>(quads + u * unit_quads, F::low, vectors + F::low * vector);
            }
        }
    }
}

template <WeightType type> void unpack(size_t n_in, const uint8_t * packed, size_t n_rows, uint8_t * rows) {
    using F = Format<type>;
    using P = PackedBlock<F>;
    DecodedBlock block = {};
    uint8_t quads[F::block / 4][vector];
    const size_t n_blocks = n_in / F::block;
    for (size_t b = 0; b < n_blocks; b++, packed += P::bytes) {
        std::memset(quads, 0, sizeof(quads));
        for (int u = 0; u < P::n_units; u++) {
            const uint8_t * vectors = packed + P::units + u * unit_vectors<F> * vector;
            unpack_bits<F::low>(vectors, 0, quads + u * unit_quads);
            if constexpr (F::high > 0) {
                unpack_bits<F::high>(vectors + F::low * vector, F::low, quads + u * unit_quads);
            }
        }
        for (size_t lane = 0; lane < n_rows; lane++) {
            for (int i = 0; i < F::block / 4; i++) {
                std::memcpy(block.q + 4 * i, quads[i] + 4 * lane, 4);
            }
            std::memcpy(&block.d, packed + P::d + F::d_bytes * lane, F::d_bytes);
            if (F::has_mins) {
                std::memcpy(&block.m, packed + P::m + 2 * lane, 2);
            }
            for (int g = 0; g < 2 * P::n_pairs; g++) {
                const size_t at = static_cast<size_t>(P::pair_bytes * (g / 2) + g % 2) + 2 * lane;
                const uint8_t scale = packed[P::scales + at];
                block.scales[g] = static_cast<int8_t>(F::has_short_scales ? scale & 15 : scale);
                if constexpr (F::has_short_scales) {
                    block.mins[g] = scale >> 4;
                } else if constexpr (F::has_mins) {
                    block.mins[g] = packed[P::mins + at];
                }
            }
            encode_block<type>(block, rows + (lane * n_blocks + b) * F::bytes);
        }
    }
}

template <size_t width> void pack_dense(size_t n_in, const uint8_t * rows, uint8_t * out) {
    for (size_t i = 0; i < n_in; i++) {
        for (size_t lane = 0; lane < panel; lane++) {
            std::memcpy(out + (i * panel + lane) * width, rows + (lane * n_in + i) * width, width);
        }
    }
}

template <size_t width> void unpack_dense(size_t n_in, const uint8_t * packed, size_t n_rows, uint8_t * rows) {
    for (size_t i = 0; i < n_in; i++) {
        for (size_t lane = 0; lane < n_rows; lane++) {
            std::memcpy(rows + (lane * n_in + i) * width, packed + (i * panel + lane) * width, width);
        }
    }
}

} // namespace

bool can_pack(WeightType type, size_t n_in, size_t n_out) {
    const Sizes sizes = sizes_of(type);
    return sizes.block > 0 && n_in > 0 && n_out > 0 && n_in % sizes.block == 0;
}

size_t panel_bytes(WeightType type, size_t n_in) {
    const Sizes sizes = sizes_of(type);
    return n_in / sizes.block * sizes.panel_bytes;
}

size_t row_bytes(WeightType type, size_t n_in) {
    const Sizes sizes = sizes_of(type);
    return n_in / sizes.block * sizes.row_bytes;
}

size_t n_panels(size_t n_out) {
    return (n_out + panel - 1) / panel;
}

void pack_panel(WeightType type, size_t n_in, const uint8_t * rows, size_t n_rows, uint8_t * out) {
    std::vector<uint8_t> padded;
    if (n_rows < panel) {
        padded.assign(rows, rows + n_rows * row_bytes(type, n_in));
        padded.resize(panel * row_bytes(type, n_in), 0);
        rows = padded.data();
    }
    switch (type) {
#define PYFLY_PACK(name)                                                                                               \
    case WeightType::name:                                                                                             \
        return pack<WeightType::name>(n_in, rows, out);
        PYFLY_FOR_EACH_FORMAT(PYFLY_PACK)
#undef PYFLY_PACK
        case WeightType::f32:
            return pack_dense<4>(n_in, rows, out);
        case WeightType::f16:
        case WeightType::bf16:
            return pack_dense<2>(n_in, rows, out);
    }
}

void unpack_panel(WeightType type, size_t n_in, const uint8_t * packed, size_t n_rows, uint8_t * rows) {
    switch (type) {
#define PYFLY_UNPACK(name)                                                                                             \
    case WeightType::name:                                                                                             \
        return unpack<WeightType::name>(n_in, packed, n_rows, rows);
        PYFLY_FOR_EACH_FORMAT(PYFLY_UNPACK)
#undef PYFLY_UNPACK
        case WeightType::f32:
            return unpack_dense<4>(n_in, packed, n_rows, rows);
        case WeightType::f16:
        case WeightType::bf16:
            return unpack_dense<2>(n_in, packed, n_rows, rows);
    }
}

} // namespace pyfly::kernels
