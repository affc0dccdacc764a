#include "products.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "attention.h"
#include "tile_permission.h"

namespace pyfly::kernels {

namespace {

struct InstructionSet {
    const char * name;
    const Products * (*products)(WeightType type);
    const Attention * attention;
    const Products * (*of_many_rows)(WeightType type, size_t n_rows) = nullptr; // null: `products`
};

InstructionSet choose() {
#ifdef PYFLY_X86
    const char * wanted = std::getenv("PYFLY_ISA");
    // Better ones than the wanted one are passed over.
    bool may_use = wanted == nullptr || *wanted == '\0';
    const auto is_allowed = [&](const char * name) {
        may_use = may_use || std::strcmp(wanted, name) == 0;
        return may_use;
    };
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
#endif
    return {"none", nullptr, nullptr};
}

const InstructionSet & chosen() {
    static const InstructionSet set = choose();
    return set;
}

} // namespace

const char * instruction_set() {
    return chosen().name;
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
