// Calls code for a type that is known at run time.
#pragma once

#include "formats.h"

// `make(type)`, for each type that is taken apart.
#define PYFLY_FOR_EACH_FORMAT(make)                                                                                    \
    make(q4_0) make(q4_1) make(q5_0) make(q5_1) make(q8_0) make(q2_k) make(q3_k) make(q4_k) make(q5_k) make(q6_k)      \
        make(iq4_nl) make(iq4_xs) make(mxfp4)
