#define PYFLY_ROWS_LEVEL baseline
#include "rows_kernel.h"

#include "divergence_kernel.h" // on top of it
