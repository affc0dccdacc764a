// Whether the steps of several requests go to the target in one batch or in parts of it.
//
// From 64 rows on, llama.cpp's flash attention on a CPU works in tiles of 64 rows and computes, for each, the cells of
// every request in it, where smaller batches pass over what a row does not need (benchmarks/README.md). Against it
// stands that every part reads the weights again. What is faster depends on machine, model and length of the requests,
// and changes as they grow; so both are tried where it runs, the slower one ever more rarely.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace pyfly {

class BatchParts {
  public:
    static constexpr size_t n_rows_least = 64;  // of a batch that may be cut
    static constexpr size_t n_rows_wanted = 48; // of a part: requests are not cut, so a part may have some more
    static constexpr int32_t wait_least = 16;   // batches between two trials of the slower way ...
    static constexpr int32_t wait_most = 256;   // ... which doubles while it stays slower

    // Into how many parts a batch goes, n_rows >= 1 of n_requests >= 1; 1: it stays whole.
    size_t choose(size_t n_rows, size_t n_requests);

    // What the batch took that was chosen last, in microseconds > 0. Ignored where nothing was to be chosen.
    void observe(double us);

  private:
    enum Way { whole, cut };
    Way faster() const { return us_of_row_[cut] < us_of_row_[whole] ? cut : whole; }

    std::array<double, 2> us_of_row_ = {}; // by way, recent batches count more
    std::array<int32_t, 2> n_seen_ = {};
    int32_t wait_ = wait_least, n_until_trial_ = wait_least;
    size_t n_rows_ = 0; // of the last batch that was chosen for; 0: nothing was to be chosen
    Way way_ = whole;
};

} // namespace pyfly
