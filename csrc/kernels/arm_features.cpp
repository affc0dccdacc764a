#include "arm_features.h"

#ifdef __linux__
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <cstddef>
#include <sys/sysctl.h>
#endif

namespace pyfly::kernels {

#ifdef __linux__

// The bits of Linux's arch/arm64/include/uapi/asm/hwcap.h; older headers do not name them all.
bool has_dot_products() {
    constexpr unsigned long asimddp = 1UL << 20;
    return (getauxval(AT_HWCAP) & asimddp) != 0;
}

bool has_matrix_products() {
    constexpr unsigned long i8mm = 1UL << 13;
    return has_dot_products() && (getauxval(AT_HWCAP2) & i8mm) != 0;
}

#elif defined(__APPLE__)

namespace {

bool has(const char * feature) {
    int value = 0;
    std::size_t size = sizeof(value);
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
}

} // namespace

bool has_dot_products() {
    return has("hw.optional.arm.FEAT_DotProd");
}

bool has_matrix_products() {
    return has_dot_products() && has("hw.optional.arm.FEAT_I8MM");
}

#else

bool has_dot_products() {
    return false;
}

bool has_matrix_products() {
    return false;
}

#endif

} // namespace pyfly::kernels
