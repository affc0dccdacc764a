// Errors inside the core: one exception type that carries the status the C ABI reports.
#pragma once

#include <stdexcept>
#include <string>

#include "pyfly.h"

namespace pyfly {

// Thrown by the core, turned into (status, message) by capi.cpp; never crosses the C ABI.
class Error : public std::runtime_error {
  public:
    Error(pyfly_status status, const std::string & message) : std::runtime_error(message), status_(status) {}

    pyfly_status status() const noexcept { return status_; }

  private:
    pyfly_status status_;
};

} // namespace pyfly
