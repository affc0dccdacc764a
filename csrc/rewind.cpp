#include "rewind.h"

namespace pyfly {

int32_t Rewind::truncate(int32_t n_held, int32_t n) {
    const int32_t n_now = n_left(n_held);
    if (n >= n_now) {
        return n_now;
    }
    const int32_t depth = n_held - n;
    const Checkpoints::Checkpoint * checkpoint = checkpoints_.longest(n);
    if (n > 0 && depth <= n_snapshots_ && depth < n_last_) {
        planned_ = {Way::snapshot, n};
    } else if (checkpoint != nullptr) {
        planned_ = {Way::checkpoint, checkpoint->n, checkpoint->state};
    } else {
        planned_ = {Way::clear, 0};
    }
    checkpoints_.forget_behind(planned_.n);
    return planned_.n;
}

Rewind::Plan Rewind::take() {
    const Plan plan = planned_;
    if (plan.way != Way::stay) {
        n_last_ = 0;
    }
    planned_ = {Way::stay, 0};
    return plan;
}

} // namespace pyfly
