#define PYFLY_ROWS_LEVEL baseline
#include "rows_kernel.h"
