// Pages of a file that nobody reads any more.
#include "llama/file_pages.h"

#include <cstdio>

#ifdef __linux__

#include <cstdint>
#include <cstring>
#include <vector>

#include "check.h"
#include "mapped_file.h"

using namespace pyfly;

namespace {

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
