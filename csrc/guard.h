// The one place where C++ exceptions become a status and a message, and where a thread stays that Python ends.
#pragma once

#include <chrono>
#include <cstdio>
#include <exception>
#include <new>
#include <thread>

#ifdef __GLIBCXX__
#include <cxxabi.h>
#endif

#include "error.h"

namespace pyfly {

inline pyfly_status report(pyfly_error * error, pyfly_status status, const char * message) {
    std::snprintf(error->message, sizeof(error->message), "%s", message);
    return status;
}

[[noreturn]] inline void sleep_for_good() {
    for (;;) {
        std::this_thread::sleep_for(std::chrono::hours(24));
    }
}

// Runs `body`; whatever it throws is reported, nothing crosses the C ABI.
//
// Before Python 3.14 a daemon thread that asks for the GIL while the program ends is ended there and then, by
// pthread_exit. In glibc this unwinds the thread's stack as an exception would, from a Python function that C++ had
// called (a logits processor, a drafter, llama.cpp's log) to here, and terminates the process where a handler keeps it.
// Such a thread sleeps until the process is gone, as Python 3.14 has it sleep. For this to work, what catches
// exceptions on the way and does not throw them on has to name std::exception, from which all of them derive.
template <typename Body> pyfly_status guard(pyfly_error * error, Body && body) noexcept {
    try {
        body();
        return PYFLY_OK;
    } catch (const Error & e) {
        return report(error, e.status(), e.what());
    } catch (const std::bad_alloc &) {
        return report(error, PYFLY_STATUS_NO_MEMORY, "out of memory");
    } catch (const std::exception & e) {
        return report(error, PYFLY_STATUS_INTERNAL, e.what());
#ifdef __GLIBCXX__
    } catch (const abi::__forced_unwind &) {
        sleep_for_good();
#endif
    } catch (...) {
        return report(error, PYFLY_STATUS_INTERNAL, "an unknown exception");
    }
}

} // namespace pyfly
