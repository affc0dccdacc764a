#define PYFLY_KERNELS_LEVEL dotprod
#include "dots_128.h"

namespace pyfly::kernels {
namespace dotprod {
namespace {

struct Simd : Dots128<Simd> {};

} // namespace
} // namespace dotprod
} // namespace pyfly::kernels

#include "product.h"
