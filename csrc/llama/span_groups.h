// Which spans llama.cpp is given in one batch. No llama.h.
#pragma once

#include <cstddef>
#include <vector>

#include "model.h"

namespace pyfly {

using SpanGroup = std::vector<size_t>; // indices of spans

// The batches for spans of different sequences, in their order. has_snapshots: the memory keeps recurrent states behind
// the last tokens of a span, which can be taken back (rewind.h).
//
// A KV cache takes everything at once. So does a recurrent memory, which splits the batch into parts of as many tokens
// of each sequence; but a part of several sequences moves their states to neighbouring cells, away from whatever
// sequence was there, and the snapshots of that one stay behind: what it takes back later would be another's state. So
// where there are snapshots, single tokens go first (none of theirs can be taken back), then one part of equally long
// spans, the largest, and then each of the others alone, which moves nobody.
std::vector<SpanGroup> group_spans(const std::vector<Span> & spans, size_t n_ubatch, bool has_snapshots);

} // namespace pyfly
