// Whether the caller still wants what runs: so that what takes long in here can be interrupted. No llama.h.
#pragma once

#include "pyfly.h"

namespace pyfly {

// See pyfly_set_stop; null: nobody is asked.
void set_stop(pyfly_stop_callback stop);

// Asks the caller, at most every 50 ms; to be called between pieces of work. Throws Error(PYFLY_STATUS_CALLBACK) once
// the caller wants no more; the next call asks anew.
void require_wanted();

} // namespace pyfly
