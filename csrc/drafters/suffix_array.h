// Sorting the suffixes of a text of token ids. No llama.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace pyfly {

// Is told now and then how much is done, 0..1; may throw to stop.
using OnProgress = std::function<void(double done)>;

// Writes the positions of all suffixes of text[n] to sorted[n], the smallest suffix first; one that another begins with
// comes before it. -1 <= text[i] < n_symbols, n < 2^31.
//
// Induced sorting (SA-IS: Nong, Zhang, Chan 2009, "Linear Suffix Array Construction by Almost Pure Induced-Sorting"):
// time linear in n whatever the text repeats. Beside the two arrays it needs n / 4 bytes, 4 for each symbol, and 4 for
// each name that a stretch of the text gets, of which there are fewer than n.
void sort_suffixes(const int32_t * text, int32_t n, int32_t n_symbols, int32_t * sorted, const OnProgress & progress);

} // namespace pyfly
