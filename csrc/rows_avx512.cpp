#define PYFLY_ROWS_LEVEL avx512
#include "rows_kernel.h"

#include "divergence_kernel.h" // on top of it
