#include "window.h"

#include <algorithm>
#include <string>

#include "error.h"

namespace pyfly {

Window::Window(const pyfly_window_config & config) : config_(config) {
    if (config.size < 0) {
        throw Error(PYFLY_STATUS_INVALID, "the window's size must be >= 0, not " + std::to_string(config.size));
    }
    if (config.rule != PYFLY_WINDOW_AGREE && config.rule != PYFLY_WINDOW_RECONVERGE) {
        throw Error(PYFLY_STATUS_INVALID, "unknown window rule " + std::to_string(config.rule));
    }
    if (config.rule == PYFLY_WINDOW_AGREE && config.across_steps != 0) {
        throw Error(PYFLY_STATUS_INVALID, "a window that wants all drafts to agree ends with its step; set "
                                          "across_steps to 0, or the rule to reconverge");
    }
    if (config.tail < -1) {
        throw Error(PYFLY_STATUS_INVALID, "the window's tail must be >= 0, not " + std::to_string(config.tail));
    }
}

bool Window::fits(int64_t n_left) const {
    int64_t needed = 0;
    if (!config_.across_steps) {
        // What the step cannot decide is rejected: agree needs the whole window in it, reconverge one position.
        needed = config_.rule == PYFLY_WINDOW_AGREE ? config_.size : std::min(config_.size, 1);
    }
    return n_left >= std::max<int64_t>(needed, config_.tail);
}

// Whether `position` is the last one of the window of `open`, or behind it.
bool Window::has_passed(int64_t open, int64_t position) const {
    return position - open >= config_.size;
}

// The oldest window with `condition`.
template <typename Condition> Window::Outcome Window::reject_oldest(pyfly_reason reason, Condition && condition) {
    const auto oldest = std::find_if(open_.begin(), open_.end(), condition);
    if (oldest == open_.end()) {
        return std::nullopt;
    }
    const Rejection rejection = {*oldest, reason};
    open_.erase(oldest, open_.end());
    return rejection;
}

// Every window under reconverge stands; under agree those that end here, because nothing in them was a mismatch.
Window::Outcome Window::match(int64_t position) {
    const auto stands = [&](int64_t open) {
        return config_.rule == PYFLY_WINDOW_RECONVERGE || has_passed(open, position);
    };
    open_.erase(std::remove_if(open_.begin(), open_.end(), stands), open_.end());
    return std::nullopt;
}

Window::Outcome Window::deferred(int64_t position) {
    if (Outcome outcome = rejected(position)) {
        return outcome; // a mismatch breaks an older window before it can open its own
    }
    if (config_.size > 0) {
        open_.push_back(position);
    }
    return std::nullopt;
}

// A mismatch breaks a window under agree, and one under reconverge that ends here.
Window::Outcome Window::rejected(int64_t position) {
    return reject_oldest(PYFLY_REASON_WINDOW, [&](int64_t open) {
        return config_.rule == PYFLY_WINDOW_AGREE || has_passed(open, position);
    });
}

// No evidence. Under agree none is open here: a window fits into what is drafted.
Window::Outcome Window::own(int64_t position) {
    return reject_oldest(PYFLY_REASON_WINDOW, [&](int64_t open) { return has_passed(open, position); });
}

Window::Outcome Window::end_of_step() {
    return reject_oldest(PYFLY_REASON_BOUNDARY, [&](int64_t) { return config_.across_steps == 0; });
}

Window::Outcome Window::give_up() {
    return reject_oldest(PYFLY_REASON_BOUNDARY, [](int64_t) { return true; });
}

Window::Outcome Window::silence() {
    return reject_oldest(PYFLY_REASON_BOUNDARY, [&](int64_t) { return config_.rule == PYFLY_WINDOW_RECONVERGE; });
}

bool Window::is_open(int64_t position) const {
    return std::find(open_.begin(), open_.end(), position) != open_.end();
}

} // namespace pyfly
