#include "window.h"

#include <algorithm>
#include <string>

#include "error.h"

namespace pyfly {

Window::Window(std::vector<pyfly_window_config> kinds) : kinds_(std::move(kinds)) {
    for (const pyfly_window_config & config : kinds_) {
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
}

bool Window::fits(int64_t n_left, size_t kind) const {
    const pyfly_window_config & config = kinds_[kind];
    int64_t needed = 0;
    if (!config.across_rounds) {
        // What the round cannot decide is rejected: agree needs the whole window in it, reconverge one position.
        needed = config.rule == PYFLY_WINDOW_AGREE ? config.size : std::min(config.size, 1);
    }
    return n_left >= std::max<int64_t>(needed, config.tail);
}

// Whether `position` is the last one of its window, or behind it.
bool Window::has_passed(const Open & open, int64_t position) const {
    return position - open.position >= config(open).size;
}

// The oldest window with `condition`.
template <typename Condition> Window::Outcome Window::reject_oldest(pyfly_reason reason, Condition && condition) {
    const auto oldest = std::find_if(open_.begin(), open_.end(), condition);
    if (oldest == open_.end()) {
        return std::nullopt;
    }
    const Rejection rejection = {oldest->position, reason};
    open_.erase(oldest, open_.end());
    return rejection;
}

// Every window under reconverge stands; under agree those that end here, because nothing in them was a mismatch.
Window::Outcome Window::match(int64_t position) {
    const auto stands = [&](Open & o) {
        o.has_match = true;
        return config(o).rule == PYFLY_WINDOW_RECONVERGE || has_passed(o, position);
    };
    open_.erase(std::remove_if(open_.begin(), open_.end(), stands), open_.end());
    return std::nullopt;
}

Window::Outcome Window::deferred(int64_t position, size_t kind) {
    if (Outcome outcome = rejected(position)) {
        return outcome; // a mismatch breaks an older window before it can open its own
    }
    if (kinds_[kind].size > 0) {
        open_.push_back({position, kind, false});
    }
    return std::nullopt;
}

// A mismatch breaks a window under agree, and one under reconverge that ends here.
Window::Outcome Window::rejected(int64_t position) {
    return reject_oldest(PYFLY_REASON_WINDOW, [&](const Open & o) {
        return config(o).rule == PYFLY_WINDOW_AGREE || has_passed(o, position);
    });
}

// No evidence: of the windows that end here those stand in which something matched, under agree.
Window::Outcome Window::own(int64_t position) {
    const auto stands = [&](const Open & o) { return o.has_match && has_passed(o, position); };
    open_.erase(std::remove_if(open_.begin(), open_.end(), stands), open_.end());
    return reject_oldest(PYFLY_REASON_WINDOW, [&](const Open & o) { return has_passed(o, position); });
}

Window::Outcome Window::end_of_round() {
    return reject_oldest(PYFLY_REASON_BOUNDARY, [&](const Open & o) { return config(o).across_rounds == 0; });
}

Window::Outcome Window::give_up() {
    return reject_oldest(PYFLY_REASON_BOUNDARY, [](const Open &) { return true; });
}

Window::Outcome Window::silence() {
    return reject_oldest(PYFLY_REASON_BOUNDARY,
                         [&](const Open & o) { return config(o).rule == PYFLY_WINDOW_RECONVERGE; });
}

bool Window::is_open(int64_t position) const {
    return std::any_of(open_.begin(), open_.end(), [&](const Open & o) { return o.position == position; });
}

} // namespace pyfly
