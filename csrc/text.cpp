#include "text.h"

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

void Text::begin() {
    is_prepared = is_waiting = is_suspect = false;
    failure = {};
    outcomes.begin();
}

void Text::had_round() {
    has_had_round = true;
    const int64_t n = n_room - static_cast<int64_t>(sequence.transcript().records().size());
    n_room = static_cast<int32_t>(std::max<int64_t>(n, 1));
}

void Text::stop(bool has_evaluated) {
    failure = current_failure();
    sequence.fail(has_evaluated);
}

void Text::make_wait() {
    is_waiting = true;
    sequence.postpone();
    sequence.memory().clear();
}

} // namespace pyfly
