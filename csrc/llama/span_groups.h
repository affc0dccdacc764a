// Which spans llama.cpp is given in one batch. No llama.h.
#pragma once

#include <cstddef>
#include <vector>

#include "model.h"

namespace pyfly {

using SpanGroup = std::vector<size_t>; // indices of spans

// Which spans of different sequences a memory can take in one batch, each kind with those before it:
//   none     each span alone
//   singles  spans of one token
//   equal    a part of equally long spans
//   all      everything at once
enum class Together { none, singles, equal, all };

// The batches for spans of different sequences, in their order.
//
// A KV cache takes everything at once. So does a recurrent memory, which splits the batch into parts of as many tokens
// of each sequence; but a part of several sequences moves their states to neighbouring cells, away from whatever
// sequence was there, and snapshots of that one (rewind.h) stay behind: what it takes back later would be another's
// state. With snapshots, `equal` is the most: single tokens go first (none of theirs can be taken back), then one part
// of equally long spans, the largest, and then each of the others alone, which moves nobody.
std::vector<SpanGroup> group_spans(const std::vector<Span> & spans, size_t n_ubatch, Together together);

} // namespace pyfly
