// What products of packed weights cost by type and number of rows, on one core: a matrix of 96 MiB, which fits no
// cache of most machines, or of as many MiB as are given (1 for what arithmetic costs), times rows of 1,536 inputs. For
// each type milliseconds of processor time, the shortest of some repeats, in brackets in single rows, C(n), and how
// many 10^9 products a second these are.
//
//     cmake -S . -B build/core -G Ninja -DPYFLY_CORE_ONLY=ON -DCMAKE_BUILD_TYPE=Release
//     ninja -C build/core pyfly_products && PYFLY_ISA=avx2 build/core/pyfly_products [REPEATS [MIB]]
//
// To compare two versions, build it in both trees and run them in turns.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "kernels/layout.h"
#include "kernels/packing.h"
#include "kernels/products.h"

using namespace pyfly::kernels;

namespace {

constexpr std::pair<WeightType, const char *> types[] = {
    {WeightType::q4_k, "Q4_K"},   {WeightType::q5_k, "Q5_K"},     {WeightType::q6_k, "Q6_K"},
    {WeightType::q8_0, "Q8_0"},   {WeightType::q4_0, "Q4_0"},     {WeightType::q4_1, "Q4_1"},
    {WeightType::q5_0, "Q5_0"},   {WeightType::q5_1, "Q5_1"},     {WeightType::q2_k, "Q2_K"},
    {WeightType::q3_k, "Q3_K"},   {WeightType::iq4_nl, "IQ4_NL"}, {WeightType::iq4_xs, "IQ4_XS"},
    {WeightType::mxfp4, "MXFP4"}, {WeightType::f16, "F16"},       {WeightType::bf16, "BF16"},
    {WeightType::f32, "F32"}};
constexpr size_t sizes[] = {1, 2, 3, 4, 6, 8, 12, 16, 32, 48, 96};
constexpr size_t n_in = 1536, slack = 64; // the last panel's loads may reach beyond the weights

double milliseconds() {
    return 1e3 * static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

int32_t * aligned(int32_t * p) {
    constexpr uintptr_t to = strip_alignment;
    return reinterpret_cast<int32_t *>((reinterpret_cast<uintptr_t>(p) + to - 1) / to * to);
}

// How many times a matrix of so many bytes is multiplied for one time.
size_t n_passes(size_t n_bytes) {
    return std::max((size_t{96} << 20) / n_bytes, size_t{1});
}

// The shortest time of a matrix of `type` times n rows.
double multiply(WeightType type, const std::vector<uint8_t> & weights, size_t n, int n_repeats) {
    const size_t n_bytes = weights.size() - slack;
    const Products & products = *pyfly::kernels::products(type, n);
    const size_t words = products.row_words(n_in), own_bytes = panel_bytes(type, n_in);
    const std::vector<float> x(n_in, 0.5f);
    std::vector<int32_t> memory(words * n + (read_behind + strip_alignment) / sizeof(int32_t));
    int32_t * strips = aligned(memory.data());
    for (size_t r = 0; r < n; r++) {
        const size_t first = r / products.strip_rows * products.strip_rows;
        products.quantise(x.data(), n_in, strips + first * words,
                          static_cast<int>(std::min(products.strip_rows, n - first)), static_cast<int>(r - first));
    }
    const size_t n_out = n_bytes / own_bytes * panel;
    std::vector<float> out(n * n_out);
    float * places[most_rows];
    for (size_t r = 0; r < n; r++) {
        places[r] = out.data() + r * n_out;
    }
    double shortest = std::numeric_limits<double>::infinity();
    for (int i = 0; i < n_repeats; i++) {
        const double begin = milliseconds();
        for (size_t pass = 0; pass < n_passes(n_bytes); pass++) {
            products.multiply(weights.data(), n_bytes / own_bytes, n_in, strips, n, places);
        }
        shortest = std::min(shortest, (milliseconds() - begin) / static_cast<double>(n_passes(n_bytes)));
    }
    return shortest;
}

} // namespace

int main(int argc, char ** argv) {
    if (std::strcmp(instruction_set(), "none") == 0) {
        std::printf("no instruction set of this machine has kernels\n");
        return 1;
    }
    const int n_repeats = argc > 1 ? std::atoi(argv[1]) : 7;
    const int n_given = argc > 2 ? std::atoi(argv[2]) : 96;
    if (n_repeats < 1 || n_given < 1) {
        std::printf("give numbers of repeats and MiB, at least 1\n");
        return 1;
    }
    const size_t n_mib = static_cast<size_t>(n_given);
    std::vector<uint8_t> weights((n_mib << 20) + slack), exponents(weights.size(), 0x78);
    std::mt19937 random(1);
    for (size_t i = 0; i < weights.size(); i += 2) { // numbers of any type of float are small, and none is subnormal
        const uint16_t bits = static_cast<uint16_t>(0x2000 | (random() & 0x03FF));
        std::memcpy(&weights[i], &bits, sizeof(bits));
    }
    std::printf("%s, %zu MiB, %d repeats\n", instruction_set(), n_mib, n_repeats);
    for (const auto & [type, name] : types) {
        std::printf("%-6s", name);
        double one = 0.0;
        for (const size_t n : sizes) {
            if (n > products(type, n)->rows_together) {
                break;
            }
            const auto & own = type == WeightType::mxfp4 ? exponents : weights;
            const double time = multiply(type, own, n, n_repeats);
            one = n == 1 ? time : one;
            const size_t n_own = (n_mib << 20) / panel_bytes(type, n_in) * panel * n_in * n;
            std::printf("  %zu: %.2f (%.2f) %.0f", n, time, time / one, static_cast<double>(n_own) / time / 1e6);
        }
        std::printf("\n");
        std::fflush(stdout);
    }
}
