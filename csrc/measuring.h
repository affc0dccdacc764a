// What batches and drafts cost, measured before somebody waits for an answer. No llama.h.
#pragma once

#include <cstdint>
#include <functional>

#include "batch.h"
#include "stopwatch.h"

namespace pyfly {

// Evaluates made-up tokens: batches of the target of as many rows as all requests together may have in an iteration
// (powers of two, and one size between two of them), and drafts of the drafters that can be measured. Each at least
// twice, the shorter counts, unless that takes too long: then once, or not at all. If batches in a row are faster, a
// batch's cost is that of one in a row, and the price of a change of size is the median of all sizes. Whatever the
// slots held is dropped; they are empty afterwards, also after an Error. Nothing is counted.
//
// clock: microseconds, never fewer than before. Empty where the target cannot rewind. Throws
// Error(PYFLY_STATUS_INVALID) while a request runs, or what a model throws.
MeasuredCosts measure(Batch & batch, const std::function<int64_t()> & clock = now_us);

} // namespace pyfly
