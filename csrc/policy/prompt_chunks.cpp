#include "prompt_chunks.h"

#include <algorithm>

namespace pyfly {

namespace {

constexpr double rate_of_steps = 0.3;  // how far what is known follows an iteration ...
constexpr double rate_of_chunks = 0.5; // ... and a chunk
constexpr double most = 2.0;           // what one of them counts for, at most: another process woke up

void follow(double & known, double us, double rate) {
    known = known == 0.0 ? us : known + rate * (std::min(us, most * known) - known);
}

} // namespace

void PromptChunks::configure(int32_t n_most, int64_t us_most) {
    n_most_ = n_most;
    us_most_ = static_cast<double>(us_most);
}

double PromptChunks::limit() const {
    return std::max(us_most_, us_of_steps_);
}

int32_t PromptChunks::n() const {
    if (us_most_ == 0.0) {
        return n_most_;
    }
    const double n = us_of_token_ == 0.0 ? n_least : limit() / us_of_token_;
    return std::min(n_most_, static_cast<int32_t>(std::clamp<double>(n, n_least, n_most_ + n_least)));
}

void PromptChunks::observe(size_t n_prompt, bool has_steps, double us) {
    if (n_prompt == 0) {
        follow(us_of_steps_, us, rate_of_steps);
        return;
    }
    // Steps draft now more and now less: at least half of the iteration counts as the chunk's.
    const double own = has_steps ? std::max(us - us_of_steps_, us / 2.0) : us;
    const bool is_short = 2 * n_prompt < static_cast<size_t>(n());
    if (us_of_token_ == 0.0 || !is_short || own > limit()) { // the last tokens of a prompt cost more each
        follow(us_of_token_, own / static_cast<double>(n_prompt), rate_of_chunks);
    }
}

} // namespace pyfly
