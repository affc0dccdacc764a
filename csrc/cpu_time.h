// CPU time: what this process used, and what nobody did.
#pragma once

#include <cstdint>
#include <optional>

namespace pyfly {

// Microseconds of CPU time that all threads of this process have used.
double process_cpu_us();

// Microseconds of CPU time that this process might have had from the CPUs which it may run on, since the machine
// started, in steps of about 10 ms.
struct UnusedCpu {
    double idle_us;
    double low_priority_us; // that went to processes of low priority: of several on a CPU, each takes its share
};

// Nothing where the system does not say it (only Linux does).
std::optional<UnusedCpu> unused_cpu();

// Threads of the whole machine that run or wait for a CPU at this moment, this one included. Nothing where the system
// does not say it (only Linux does).
std::optional<int32_t> n_runnable();

} // namespace pyfly
