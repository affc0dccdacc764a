// Notices when the text has begun to repeat itself. No llama.h.
//
// FLy's known failure is a loose accept that steers a greedy model into a repetition. A loop of period p shows as a run
// of positions that equal the position p before; the guard keeps one run length for each period.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pyfly {

class LoopGuard {
  public:
    static constexpr int32_t max_period = 64;
    static constexpr int32_t min_run = 24; // shorter repetitions are ordinary text: rules, indentation, digits

    // Starts anew on a text; only what is pushed afterwards counts (a prompt may repeat itself as it likes).
    void begin(size_t n_prompt);

    // Follows `history` to its present end: tokens behind the end of the last call are taken in, and if it has become
    // shorter or changed there, the runs are taken back. `n_same`: length of the prefix that is unchanged since.
    void follow(const std::vector<int32_t> & history, size_t n_same);

    // Where the loop in progress began to repeat (the first position that equals the one a period before), or -1: no
    // period has repeated twice over, for at least min_run positions.
    int64_t loop_begin() const { return loop_begin_; }

  private:
    void push(const std::vector<int32_t> & history, size_t position);

    std::array<int32_t, max_period + 1> run_ = {};
    size_t n_prompt_ = 0;
    size_t n_ = 0; // positions taken in
    int64_t loop_begin_ = -1;
};

} // namespace pyfly
