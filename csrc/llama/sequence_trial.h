// How llama.cpp's graph of a model with recurrent states copes with several sequences.
#pragma once

#include "llama.h"
#include "span_groups.h"

namespace pyfly {

// Which spans of different sequences the graph of a context takes, whose memory holds recurrent states. Some graphs
// cannot be built for several sequences: an assertion that fails would end the process. So a few tokens of several
// sequences are tried in a small context, which is thrown away. Not tried, and taken for right, where there is no
// memory for that.
Together find_together(llama_context * context);

} // namespace pyfly
