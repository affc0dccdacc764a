#define PYFLY_ROWS_LEVEL avx2
#include "rows_kernel.h"
