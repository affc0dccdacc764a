// A file that is mapped, and which of its pages are in memory. Linux alone.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

inline const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));

// How many of the pages at `begin` are in the memory of this process.
inline size_t n_present(const uint8_t * begin, size_t n) {
    const int pages = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    std::vector<uint64_t> entries(n);
    const auto at = static_cast<off_t>(reinterpret_cast<uintptr_t>(begin) / page * sizeof(uint64_t));
    const auto n_bytes = static_cast<ssize_t>(n * sizeof(uint64_t));
    check(pread(pages, entries.data(), static_cast<size_t>(n_bytes), at) == n_bytes, "pages are listed");
    close(pages);
    size_t out = 0;
    for (const uint64_t entry : entries) {
        out += entry >> 63;
    }
    return out;
}

// Byte i is i / page + 1.
class MappedFile {
  public:
    MappedFile(size_t size, int permissions, int flags) : size_(size) {
        std::string name = (std::getenv("TMPDIR") == nullptr ? "/tmp" : std::getenv("TMPDIR")) + std::string("/XXXXXX");
        const int file = mkstemp(&name[0]);
        std::vector<uint8_t> content(size);
        for (size_t i = 0; i < size; i++) {
            content[i] = static_cast<uint8_t>(i / page + 1);
        }
        check(write(file, content.data(), size) == static_cast<ssize_t>(size), "a file is written");
        bytes = static_cast<uint8_t *>(mmap(nullptr, size, permissions, flags | MAP_POPULATE, file, 0));
        check(bytes != MAP_FAILED, "a file is mapped");
        close(file);
        unlink(name.c_str());
    }
    ~MappedFile() { munmap(bytes, size_); }
    MappedFile(const MappedFile &) = delete;
    MappedFile & operator=(const MappedFile &) = delete;

    uint8_t * bytes;

  private:
    size_t size_;
};
