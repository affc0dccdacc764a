// CPU time: what this process used, and what nobody did.
#pragma once

#include <optional>

namespace pyfly {

// Microseconds of CPU time that all threads of this process have used.
double process_cpu_us();

// Microseconds of CPU time that the CPUs which this process may run on had left (idle, or for processes of low
// priority) since the machine started, in steps of about 10 ms. Nothing where the system does not say it (only Linux
// does).
std::optional<double> unused_cpu_us();

} // namespace pyfly
