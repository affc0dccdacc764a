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
    if (config.tail < -1) {
        throw Error(PYFLY_STATUS_INVALID, "the window's tail must be >= 0, not " + std::to_string(config.tail));
    }
}

bool Window::fits(int64_t n_left) const {
    int64_t needed = 0;
    if (!config_.across_rounds) {
        // What the round cannot decide is rejected: agree needs the whole window in it, reconverge one position.
        needed = config_.rule == PYFLY_WINDOW_AGREE ? config_.size : std::min(config_.size, 1);
    }
    return n_left >= std::max<int64_t>(needed, config_.tail);
}

Window::Outcome Window::reject_oldest(pyfly_reason reason) {
    const Rejection rejection = {open_.front(), reason};
    open_.clear();
    return rejection;
}

// Reconverge: a window whose last position has passed without a match is broken.
Window::Outcome Window::expire(int64_t position) {
    if (!open_.empty() && position - open_.front() >= config_.size) {
        return reject_oldest(PYFLY_REASON_WINDOW);
    }
    return std::nullopt;
}

Window::Outcome Window::match(int64_t position) {
    if (config_.rule == PYFLY_WINDOW_RECONVERGE) {
        open_.clear(); // all of them are within W positions, or expire() had rejected the oldest
    } else if (!open_.empty() && position - open_.front() >= config_.size) {
        open_.clear(); // W positions passed, none of them a mismatch
    }
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

Window::Outcome Window::rejected(int64_t position) {
    if (config_.rule == PYFLY_WINDOW_RECONVERGE) {
        return expire(position);
    }
    return open_.empty() ? std::nullopt : reject_oldest(PYFLY_REASON_WINDOW);
}

Window::Outcome Window::own(int64_t position) {
    if (config_.rule == PYFLY_WINDOW_RECONVERGE) {
        return expire(position);
    }
    return match(position); // neutral: the position passes
}

Window::Outcome Window::end_of_round() {
    return config_.across_rounds ? std::nullopt : give_up();
}

Window::Outcome Window::give_up() {
    return open_.empty() ? std::nullopt : reject_oldest(PYFLY_REASON_BOUNDARY);
}

void Window::end_of_text() {
    open_.clear();
}

bool Window::is_open(int64_t position) const {
    return std::find(open_.begin(), open_.end(), position) != open_.end();
}

} // namespace pyfly
