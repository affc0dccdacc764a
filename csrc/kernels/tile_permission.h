#pragma once

namespace pyfly::kernels {

// Asks the operating system to let this process use AMX's tiles for bytes (tiles.h); false if the processor or the
// system has none, or the system refuses. Threads that there are and threads to come have what it grants. From then on
// Linux wants alternate signal stacks of about 12 KB or more, and it refuses if a thread has a smaller one.
bool may_use_tiles();

} // namespace pyfly::kernels
