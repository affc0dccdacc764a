#pragma once

#include <cstddef>

namespace pyfly {

// Lets go of the whole pages of [data, data + size) if they are part of a file that is mapped shared and for reading,
// as llama.cpp maps models: they no longer count as memory of this process. Whoever still reads them gets them from the
// file again. False, and nothing is done, for other memory, and on systems other than Linux.
bool release_file_pages(const void * data, size_t size);

} // namespace pyfly
