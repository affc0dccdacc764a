// Pages of a file that nobody reads any more.
#include "llama/file_pages.h"

#include <cstdio>

#ifdef __linux__

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

using namespace pyfly;

namespace {

const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));

// How many of the pages at `begin` are in the memory of this process.
size_t n_present(const uint8_t * begin, size_t n) {
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

void test_shared_file() {
    const MappedFile file(6 * page, PROT_READ, MAP_SHARED);
    check(n_present(file.bytes, 6) == 6, "all of the file is there");
    check(release_file_pages(file.bytes + 10, 4 * page), "pages of a file");
    check(n_present(file.bytes, 6) == 3, "the three whole pages are gone, and no other");
    for (size_t i = 0; i < 6; i++) {
        check(file.bytes[i * page] == i + 1, "what is read again is the file");
    }
    check(!release_file_pages(file.bytes + 10, page), "less than a page");
    check(!release_file_pages(file.bytes + page, 6 * page), "more than the file");
}

// Memory whose content is in no file stays.
void test_other_memory() {
    const MappedFile file(4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE);
    std::memset(file.bytes, 99, 4 * page);
    check(!release_file_pages(file.bytes, 4 * page) && file.bytes[page] == 99, "a file with changes of our own");
    mprotect(file.bytes, 4 * page, PROT_READ);
    check(!release_file_pages(file.bytes, 4 * page) && file.bytes[page] == 99, "the same, when they are made");
    std::vector<uint8_t> own(1 << 20, 99);
    check(!release_file_pages(own.data(), own.size()) && own[own.size() / 2] == 99, "memory of our own");
    auto * anonymous =
        static_cast<uint8_t *>(mmap(nullptr, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    std::memset(anonymous, 99, 4 * page);
    mprotect(anonymous, 4 * page, PROT_READ);
    check(!release_file_pages(anonymous, 4 * page) && anonymous[2 * page] == 99, "memory that is in no file");
    munmap(anonymous, 4 * page);
}

} // namespace

int main() {
    test_shared_file();
    test_other_memory();
    std::printf("%s\n", n_failed == 0 ? "ok" : "failed");
    return n_failed == 0 ? 0 : 1;
}

#else

int main() {
    const char bytes[3] = "ab";
    return pyfly::release_file_pages(bytes, sizeof(bytes)) ? 1 : 0;
}

#endif
