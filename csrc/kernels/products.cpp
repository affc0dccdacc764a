#include "products.h"

#include <cstdlib>
#include <cstring>

#include "attention.h"

namespace pyfly::kernels {

namespace {

struct InstructionSet {
    const char * name;
    const Products * (*products)(WeightType type);
    const Attention * attention;
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
    __builtin_cpu_init();
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (is_allowed("avx512vnni") && has_avx2 && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
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

const Products * products(WeightType type) {
    return chosen().products == nullptr ? nullptr : chosen().products(type);
}

const Attention * attention() {
    return chosen().attention;
}

} // namespace pyfly::kernels
