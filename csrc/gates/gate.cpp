#include "gate.h"

#include <cmath>

#include "error.h"

namespace pyfly {

double Evidence::p_top() const {
    return std::exp(target.log_prob(target.max.logit));
}

double Evidence::p_drafted() const {
    return std::exp(target.log_prob(drafted_logit));
}

void require(bool condition, const std::string & message) {
    if (!condition) {
        throw Error(PYFLY_STATUS_INVALID, message);
    }
}

void require_nats(double value, const std::string & what) {
    require(std::isfinite(value) && value >= 0.0, what + " must be a finite number of nats >= 0");
}

void require_share(double value, const std::string & what) {
    require(value >= 0.0 && value <= 1.0, what + " must be in [0, 1]");
}

void require_top(int32_t n, const std::string & what) {
    require(n >= 1 && n <= max_top, what + " must be in 1.." + std::to_string(max_top) + ", not " + std::to_string(n));
}

} // namespace pyfly
