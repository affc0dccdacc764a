#include "products.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "attention.h"
#include "tile_permission.h"
#if defined(PYFLY_DOTPROD)
#include "arm_features.h"
#endif

namespace pyfly::kernels {

namespace {

struct InstructionSet {
    const char * name;
    const Products * (*products)(WeightType type);
    const Attention * attention;
    const Products * (*of_many_rows)(WeightType type, size_t n_rows) = nullptr; // null: `products`
};

const InstructionSet none = {"none", nullptr, nullptr};

// What PYFLY_ISA names; empty: nothing.
const char * wanted() {
    const char * name = std::getenv("PYFLY_ISA");
    return name == nullptr ? "" : name;
}

#if defined(PYFLY_X86)

constexpr const char * lacking = "AVX2";
constexpr const char * known = "amx, avx512vnni, avxvnni and avx2";

// `is_allowed(name)` is asked for the best one first.
template <class IsAllowed> InstructionSet choose(IsAllowed is_allowed) {
    [[maybe_unused]] const bool wants_amx = is_allowed("amx");
    __builtin_cpu_init();
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (is_allowed("avx512vnni") && has_avx2 && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
#ifdef PYFLY_AMX
        if (wants_amx && may_use_tiles()) {
            return {"amx", avx512vnni::products, &avx512vnni::attention, amx::products};
        }
#endif
        return {"avx512vnni", avx512vnni::products, &avx512vnni::attention};
    }
#ifdef PYFLY_AVXVNNI
    if (is_allowed("avxvnni") && has_avx2 && __builtin_cpu_supports("avxvnni")) {
        return {"avxvnni", avxvnni::products, &avx2::attention};
    }
#endif
    if (is_allowed("avx2") && has_avx2) {
        return {"avx2", avx2::products, &avx2::attention};
    }
    return none;
}

#elif defined(PYFLY_DOTPROD)

constexpr const char * lacking = "dot products of bytes (FEAT_DotProd)";
constexpr const char * known = "i8mm and dotprod";

template <class IsAllowed> InstructionSet choose(IsAllowed is_allowed) {
#ifdef PYFLY_I8MM
    if (is_allowed("i8mm") && has_matrix_products()) {
        return {"i8mm", i8mm::products, &neon::attention};
    }
#endif
    if (is_allowed("dotprod") && has_dot_products()) {
        return {"dotprod", dotprod::products, &neon::attention};
    }
    return none;
}

#else

constexpr const char * lacking = "instructions that they are written for";
constexpr const char * known = "none";

template <class IsAllowed> InstructionSet choose(IsAllowed) {
    return none;
}

#endif

const InstructionSet & chosen() {
    static const InstructionSet set = [] {
        bool may_use = *wanted() == '\0'; // better ones than the wanted one are passed over
        return choose([&](const char * name) { return may_use = may_use || std::strcmp(wanted(), name) == 0; });
    }();
    return set;
}

} // namespace

const char * instruction_set() {
    return chosen().name;
}

std::string why_no_instruction_set() {
    return *wanted() == '\0' ? std::string("this processor has no ") + lacking
                             : std::string("PYFLY_ISA is ") + wanted() + "; of " + known +
                                   ", best first, this processor has none from there on";
}

const Products * products(WeightType type, size_t n_rows) {
    const InstructionSet & set = chosen();
    if (const Products * many = set.of_many_rows == nullptr ? nullptr : set.of_many_rows(type, n_rows)) {
        return many;
    }
    return set.products == nullptr ? nullptr : set.products(type);
}

size_t most_row_words(WeightType type, size_t n_in) {
    return std::max(products(type, 1)->row_words(n_in), products(type, most_rows)->row_words(n_in));
}

const Attention * attention() {
    return chosen().attention;
}

} // namespace pyfly::kernels
