#pragma once

#include <cstddef>

namespace pyfly {

// Lets go of the whole pages of [data, data + size) if it is part of a file that is mapped for reading: they no longer
// count as memory of this process, and are read again from the file, which the system may still have, if they are used
// again. False, and nothing is done, for other memory, and where the system does not tell what is mapped (it is Linux
// that does).
bool release_file_pages(const void * data, size_t size);

} // namespace pyfly
