#define PYFLY_ROWS_LEVEL avx512
#include "rows_kernel.h"
