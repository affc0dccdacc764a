#include "evaluation.h"

#include <algorithm>
#include <exception>

#include "stopwatch.h"

namespace pyfly {

namespace {

// Rows of a step and none of a prompt.
bool is_step(const Plan & plan) {
    const Sequence & sequence = plan.request->sequence;
    return plan.span.first_row == 0 && !(sequence.config().all_rows && sequence.n_steps() == 0);
}

// Nothing but steps, of requests that are evaluated together: their time says what such a batch costs.
bool are_steps(const Plans & plans) {
    return !plans.empty() && std::all_of(plans.begin(), plans.end(), [](const Plan & plan) {
        return is_step(plan) && plan.request->is_running() && !plan.request->schedule.is_suspect;
    });
}

size_t rows_of(const Plans & plans) {
    size_t n = 0;
    for (const Plan & plan : plans) {
        n += plan.span.n;
    }
    return n;
}

// Tokens of spans that are no steps, or not only.
size_t n_of_prompts(const Plans & plans) {
    size_t n = 0;
    for (const Plan & plan : plans) {
        n += is_step(plan) ? 0 : plan.span.n;
    }
    return n;
}

} // namespace

void Evaluation::evaluate(const std::vector<Span> & spans) {
    target_.evaluate(spans);
    drafting_.observe(spans);
}

void Evaluation::run(const Plans & plans) {
    const size_t n_rows = rows_of(plans);
    const bool is_telling = are_steps(plans);
    const size_t n_parts = is_telling ? parts_.choose(n_rows, plans.size()) : 1;

    Plans part;
    std::optional<int64_t> us = 0;
    size_t n = 0, n_before = 0, last = 0;
    const auto finish = [&] {
        const std::optional<int64_t> of_part = attempt(part);
        us = us && of_part ? std::optional(*us + *of_part) : std::nullopt;
        part.clear();
        n = 0;
    };
    for (const Plan & plan : plans) {
        const bool is_alone =
            plan.request->schedule.is_suspect || (!part.empty() && part.back().request->schedule.is_suspect);
        const size_t place = (2 * n_before + plan.span.n) * n_parts / (2 * n_rows); // of its middle
        const bool is_full = n + plan.span.n > static_cast<size_t>(target_.n_batch());
        if (!part.empty() && (is_alone || is_full || place != last)) {
            finish();
        }
        part.push_back(plan);
        n += plan.span.n;
        n_before += plan.span.n;
        last = place;
    }
    finish();
    if (is_telling && us) {
        parts_.observe(static_cast<double>(*us));
        drafting_.observe_target(static_cast<int32_t>(n_rows), static_cast<double>(*us));
    }
    if (us.value_or(0) > 0) {
        const bool has_steps = std::any_of(plans.begin(), plans.end(), is_step);
        chunks_.observe(n_of_prompts(plans), has_steps, static_cast<double>(*us));
    }
}

// Plans that fit in one batch. Returns the microseconds that they took; nothing where they had to be tried again.
std::optional<int64_t> Evaluation::attempt(const Plans & planned) {
    Plans plans;
    std::vector<Span> spans;
    for (const Plan & plan : planned) {
        if (plan.request->is_running()) { // it may have had to make room since
            plans.push_back(plan);
            spans.push_back(plan.span);
        }
    }
    if (plans.empty()) {
        return 0;
    }
    int64_t us = 0;
    try {
        const Stopwatch stopwatch(us);
        evaluate(spans);
    } catch (const std::exception &) {
        try_again(plans);
        return std::nullopt;
    }
    take(plans, us);
    return us;
}

// After the exception that is being handled.
void Evaluation::try_again(const Plans & plans) {
    for (const Plan & plan : plans) {
        plan.request->sequence.memory().failed();
    }
    const bool has_room = current_failure().status == PYFLY_STATUS_CONTEXT_FULL && make_room();
    if (plans.size() == 1 && !has_room) {
        plans.front().request->stop(false);
        return;
    }
    Plans rest;
    for (const Plan & plan : plans) {
        if (!plan.request->is_running()) {
            continue;
        }
        if (plan.request->sequence.memory().n() < plan.span.n_past) { // what it had is lost: another time
            plan.request->schedule.is_suspect = plan.request->schedule.is_suspect || !has_room;
            plan.request->sequence.postpone();
        } else {
            rest.push_back(plan);
        }
    }
    const auto middle = rest.begin() + static_cast<std::ptrdiff_t>(has_room ? rest.size() : rest.size() / 2);
    attempt({rest.begin(), middle});
    attempt({middle, rest.end()});
}

void Evaluation::take(const Plans & plans, int64_t us) {
    const int64_t n_rows = static_cast<int64_t>(rows_of(plans));
    for (size_t i = 0; i < plans.size(); i++) {
        Request & request = *plans[i].request;
        const int32_t n_steps = request.sequence.n_steps();
        try {
            request.sequence.take(i, us * static_cast<int64_t>(plans[i].span.n) / n_rows);
            if (request.sequence.n_steps() > n_steps) {
                request.schedule.is_suspect = false; // not before: what made its batch fail may be the row of a step
                request.had_step();
                drafting_.learn(request);
            }
        } catch (const std::exception &) {
            request.stop(true);
        }
    }
}

bool Evaluation::make_room() {
    Request * idle = nullptr;
    Request * youngest = nullptr;
    size_t n_running = 0;
    for (Request & request : requests_) {
        if (!request.is_running()) { // also one that waits may hold something: it was parked
            idle = request.sequence.memory().n() > 0 && (idle == nullptr || request.schedule.used < idle->schedule.used)
                       ? &request
                       : idle;
        } else {
            n_running++;
            youngest = youngest == nullptr || request.schedule.order > youngest->schedule.order ? &request : youngest;
        }
    }
    if (idle != nullptr) {
        idle->sequence.memory().clear();
        return true;
    }
    if (n_running < 2) {
        return false;
    }
    youngest->make_wait();
    return true;
}

} // namespace pyfly
