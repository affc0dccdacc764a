// The one place where C++ exceptions become a status and a message.
#pragma once

#include <cstdio>
#include <exception>
#include <new>

#include "error.h"

namespace pyfly {

inline pyfly_status report(pyfly_error * error, pyfly_status status, const char * message) {
    std::snprintf(error->message, sizeof(error->message), "%s", message);
    return status;
}

// Runs `body`; whatever it throws is reported, nothing crosses the C ABI.
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
    } catch (...) {
        return report(error, PYFLY_STATUS_INTERNAL, "an unknown exception");
    }
}

} // namespace pyfly
