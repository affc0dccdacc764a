#include "tile_permission.h"

#ifdef __linux__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pyfly::kernels {

bool may_use_tiles() {
#ifdef __linux__
    unsigned a = 0, b = 0, c = 0, d = 0;
    const unsigned tiles = 1U << 24, bytes = 1U << 25; // AMX-TILE, AMX-INT8
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & tiles) == 0 || (d & bytes) == 0) {
        return false;
    }
    constexpr long request_permission = 0x1023, tile_data = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false; // elsewhere it has not been tried
#endif
}

} // namespace pyfly::kernels
