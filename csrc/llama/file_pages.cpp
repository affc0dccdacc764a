#include "file_pages.h"

#ifdef __linux__
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <memory>

#include <sys/mman.h>
#include <unistd.h>
#endif

namespace pyfly {

#ifdef __linux__

namespace {

struct CloseFile {
    void operator()(FILE * file) const { std::fclose(file); }
};

// Whether these addresses lie in one shared mapping of a file that this process cannot write to. A private one may hold
// what was written before it became read-only.
bool is_shared_file(uintptr_t begin, uintptr_t end) {
    const std::unique_ptr<FILE, CloseFile> maps(std::fopen("/proc/self/maps", "re"));
    if (maps == nullptr) {
        return false;
    }
    char line[512];
    bool is_first_part = true; // of a line: paths may be longer than there is room
    while (std::fgets(line, sizeof(line), maps.get()) != nullptr) {
        uintptr_t own_begin = 0, own_end = 0;
        char permissions[5] = "";
        unsigned long inode = 0;
        const bool is_whole = is_first_part && std::sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s %*x %*x:%*x %lu",
                                                           &own_begin, &own_end, permissions, &inode) == 4;
        if (is_whole && own_begin <= begin && end <= own_end) {
            return inode != 0 && permissions[1] == '-' && permissions[3] == 's';
        }
        size_t n = 0;
        while (line[n] != '\0' && line[n] != '\n') {
            n++;
        }
        is_first_part = line[n] == '\n';
    }
    return false;
}

} // namespace

bool release_file_pages(const void * data, size_t size) {
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + size) / page * page;
    return begin < end && is_shared_file(begin, end) &&
           madvise(reinterpret_cast<void *>(begin), end - begin, MADV_DONTNEED) == 0;
}

#else

bool release_file_pages(const void *, size_t) {
    return false;
}

#endif

} // namespace pyfly
