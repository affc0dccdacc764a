#include "rule.h"

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

} // namespace pyfly
