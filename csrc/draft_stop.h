// Where a draft ends before its full length: asked by a drafter, decided by the policy.
#pragma once

#include <functional>

namespace pyfly {

// Whether a draft continues with the token that the drafter has at hand.
enum class DraftStep {
    ends_before, // the token is not worth a row of the target
    ends_behind, // it is, another one is not worth the work
    goes_on
};

// Asked of one draft's tokens in turn, each with the drafter's probability of its most probable token there, 0..1. It
// is asked before anything is drawn, so which token is proposed does not depend on whether one is.
using DraftStop = std::function<DraftStep(double p)>;

} // namespace pyfly
