// Locks of the library that a fork can still take. No llama.h.
#pragma once

#include <mutex>

#ifndef _WIN32
#include <pthread.h>
#endif

namespace pyfly {

// The process forks only while nobody else holds `mutex`, so that no fork finds it taken by a thread that the fork does
// not have. To be called once for each. mutex: lives as long as the library.
template <std::mutex & mutex> bool hold_over_forks() {
#ifdef _WIN32
    return true; // no forks
#else
    return pthread_atfork([] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); }) == 0;
#endif
}

} // namespace pyfly
