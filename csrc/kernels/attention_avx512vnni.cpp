#define PYFLY_KERNELS_LEVEL avx512vnni
#include "attention_512.h"

namespace pyfly::kernels {
namespace avx512vnni {
namespace {

using Wide = Sixteen;

} // namespace
} // namespace avx512vnni
} // namespace pyfly::kernels

#include "attention_steps.h"
