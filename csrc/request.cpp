#include "request.h"

#include <algorithm>
#include <new>

#include "error.h"

namespace pyfly {

Failure current_failure() {
    try {
        throw;
    } catch (const Error & e) {
        return {e.status(), e.what()};
    } catch (const std::bad_alloc &) {
        return {PYFLY_STATUS_NO_MEMORY, "out of memory"};
    } catch (const std::exception & e) {
        return {PYFLY_STATUS_INTERNAL, e.what()};
    }
}

void Request::begin() {
    schedule.is_prepared = schedule.is_waiting = schedule.is_suspect = false;
    failure = {};
    learning.outcomes.begin();
}

void Request::had_step() {
    schedule.has_had_step = true;
    const int64_t n = schedule.n_room - static_cast<int64_t>(sequence.transcript().records().size());
    schedule.n_room = static_cast<int32_t>(std::max<int64_t>(n, 1));
}

void Request::stop(bool has_evaluated) {
    failure = current_failure();
    sequence.fail(has_evaluated);
}

void Request::make_wait() {
    schedule.is_waiting = true;
    sequence.postpone();
    sequence.memory().clear();
}

} // namespace pyfly
