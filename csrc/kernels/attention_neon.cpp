#define PYFLY_KERNELS_LEVEL neon
#include "attention_128.h"

namespace pyfly::kernels {
namespace neon {
namespace {

using Wide = Eight;

} // namespace
} // namespace neon
} // namespace pyfly::kernels

#include "attention_steps.h"
