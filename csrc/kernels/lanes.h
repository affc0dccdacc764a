// Nothing of these functions may be left to be called: they have their file's instruction set.
#pragma once

#define PYFLY_INLINE inline __attribute__((always_inline))
#define PYFLY_LANES inline static __attribute__((always_inline))
