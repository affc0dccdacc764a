#define PYFLY_KERNELS_LEVEL avx2
#include "attention_256.h"

namespace pyfly::kernels {
namespace avx2 {
namespace {

using Wide = Eight;

} // namespace
} // namespace avx2
} // namespace pyfly::kernels

#include "attention_steps.h"
