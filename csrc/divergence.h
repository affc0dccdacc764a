// How far two rows are from each other. No llama.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pyfly {

struct RowStats;

// p = softmax of the target's row, q of the draft's, m = (p + q) / 2; KL(a || b) = sum a ln(a / b).
enum class Divergence {
    kl,        // KL(q || p)
    kl_target, // KL(p || q)
    js,        // KL(p || m) / 2 + KL(q || m) / 2, in [0, ln 2]
    js_code,   // KL(m || p) / 2 + KL(m || q) / 2: the "js_div" of the code of fuzzy speculative decoding
    tv,        // sum |p - q| / 2, in [0, 1]
};

// Whether the divergence is at most `threshold` nats (>= 0, finite). The divergence is >= 0, +inf where one row forbids
// what the other needs, and computed within 1e-5 of its value, or within 2e-8 where that is more.
// Both rows [n_vocab], `target` being the statistics of p's; n_top > 0: over the n_top most probable tokens of the
// target (at a tie the lowest) and all others together. Throws Error(PYFLY_STATUS_NOT_FINITE) if q's row has no
// distribution.
bool is_within(Divergence kind, double threshold, const RowStats & target, const float * p_row, const float * q_row,
               size_t n_vocab, int32_t n_top);

} // namespace pyfly
