#include "cpu_time.h"

#ifdef _WIN32
#include <windows.h>
#else
#include <ctime>
#endif

#ifdef __linux__
#include <cctype>
#include <cinttypes>
#include <cstdio>
#include <memory>
#include <sched.h>
#include <unistd.h>
#endif

namespace pyfly {

#ifdef _WIN32

double process_cpu_us() {
    FILETIME created, exited, kernel, user;
    if (!GetProcessTimes(GetCurrentProcess(), &created, &exited, &kernel, &user)) {
        return 0.0;
    }
    const auto us = [](const FILETIME & time) { // in steps of 100 ns
        return ((static_cast<unsigned long long>(time.dwHighDateTime) << 32) | time.dwLowDateTime) / 10.0;
    };
    return us(kernel) + us(user);
}

#else

double process_cpu_us() {
    timespec now = {};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

#endif

#ifdef __linux__

std::optional<UnusedCpu> unused_cpu() {
    cpu_set_t allowed;
    const std::unique_ptr<std::FILE, int (*)(std::FILE *)> file(std::fopen("/proc/stat", "re"), std::fclose);
    if (!file || sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
        return std::nullopt;
    }
    double idle_ticks = 0.0, low_ticks = 0.0;
    int n_cpus = 0;
    char line[256] = "";
    while (std::fgets(line, sizeof(line), file.get())) {
        int cpu = 0;
        uint64_t user, nice, system, idle, iowait;
        if (std::isdigit(static_cast<unsigned char>(line[3])) && // the sum of all has a blank there
            std::sscanf(line, "cpu%d %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64, &cpu, &user, &nice,
                        &system, &idle, &iowait) == 6) {
            if (cpu < CPU_SETSIZE && CPU_ISSET(cpu, &allowed)) {
                idle_ticks += static_cast<double>(idle + iowait);
                low_ticks += static_cast<double>(nice);
                n_cpus++;
            }
        } else if (n_cpus > 0) {
            break; // the long lines of interrupts come after the CPUs
        }
    }
    if (n_cpus == 0) {
        return std::nullopt;
    }
    const double us_per_tick = 1e6 / static_cast<double>(sysconf(_SC_CLK_TCK));
    return UnusedCpu{idle_ticks * us_per_tick, low_ticks * us_per_tick};
}

std::optional<int32_t> n_runnable() {
    const std::unique_ptr<std::FILE, int (*)(std::FILE *)> file(std::fopen("/proc/loadavg", "re"), std::fclose);
    int n = 0;
    return file && std::fscanf(file.get(), "%*f %*f %*f %d/", &n) == 1 ? std::optional<int32_t>(n) : std::nullopt;
}

#else

std::optional<UnusedCpu> unused_cpu() {
    return std::nullopt;
}

std::optional<int32_t> n_runnable() {
    return std::nullopt;
}

#endif

} // namespace pyfly
