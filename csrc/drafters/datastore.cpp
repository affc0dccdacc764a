#include "datastore.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>
#include <string>

#include "error.h"
#include "guard.h"

namespace pyfly {

namespace {

constexpr char magic[8] = {'P', 'Y', 'F', 'L', 'Y', 'D', 'S', '\n'};
constexpr uint32_t version = 1;

struct Header {
    char magic[8];
    uint32_t version;
    int32_t n_vocab;
    int64_t n_tokens;
    uint64_t vocabulary;
    uint64_t checksum; // of everything behind the header
    uint8_t reserved[16];
    uint64_t header_checksum; // of what stands before it
};
static_assert(sizeof(Header) == PYFLY_STORE_HEADER, "the file format");

// FNV-1a in steps of 32 bits: a change in one step always shows.
uint64_t checksum(const void * data, size_t n_words, uint64_t hash = 14695981039346656037u) {
    const auto * bytes = static_cast<const uint8_t *>(data);
    for (size_t i = 0; i < n_words; i++) {
        uint32_t word;
        std::memcpy(&word, bytes + 4 * i, sizeof(word));
        hash = (hash ^ word) * 1099511628211u;
    }
    return hash;
}

uint64_t header_checksum(const Header & header) {
    return checksum(&header, offsetof(Header, header_checksum) / 4);
}

Error invalid(const std::string & what) {
    return Error(PYFLY_STATUS_INVALID, "the datastore " + what);
}

} // namespace

Datastore::Datastore(const void * data, size_t n_bytes)
    : data_(static_cast<const uint8_t *>(data) + sizeof(Header)), checksum_(0), info_() {
    Header header = {};
    if (n_bytes == 0) {
        throw invalid("is empty; build it again");
    }
    std::memcpy(&header, data, std::min(n_bytes, sizeof(header)));
    if (std::memcmp(header.magic, magic, std::min(n_bytes, sizeof(magic))) != 0) {
        throw invalid("is not one: it begins differently; build one with `pyfly-cpp datastore build`");
    }
    if (n_bytes < sizeof(header)) {
        throw invalid("is cut short; build it again");
    }
    if (header.header_checksum != header_checksum(header)) {
        throw invalid("has a damaged header; build it again");
    }
    if (header.version != version) {
        throw invalid("has the format " + std::to_string(header.version) + ", and this pyfly-cpp reads " +
                      std::to_string(version) + "; build it again");
    }
    if (header.n_vocab < 1 || header.n_tokens < 1 || header.n_tokens > std::numeric_limits<int32_t>::max()) {
        throw invalid("holds no tokens; build it again");
    }
    const uint64_t n_expected = sizeof(header) + 8 * static_cast<uint64_t>(header.n_tokens);
    if (n_bytes != n_expected) {
        throw invalid("has " + std::to_string(n_bytes) + " bytes instead of " + std::to_string(n_expected) +
                      "; build it again");
    }
    checksum_ = header.checksum;
    info_ = {header.n_tokens, header.n_vocab, header.vocabulary};
}

bool Datastore::is_intact() const {
    return checksum(data_, 2 * static_cast<size_t>(info_.n_tokens)) == checksum_;
}

int32_t Datastore::number(int64_t i) const {
    int32_t out;
    std::memcpy(&out, data_ + 4 * i, sizeof(out));
    return out;
}

int32_t Datastore::token(int64_t position) const {
    if (position < 0 || position >= n()) {
        return separator;
    }
    const int32_t token = number(position);
    return token >= 0 && token < info_.n_vocab ? token : separator;
}

int64_t Datastore::suffix(int64_t rank) const {
    const int64_t position = number(n() + rank);
    return position >= 0 && position < n() ? position : n();
}

// Of the suffix with pattern[n]: < 0 where it is smaller, 0 where it begins with it.
int Datastore::compare(int64_t rank, const int32_t * pattern, size_t n_pattern) const {
    const int64_t begin = suffix(rank);
    for (size_t i = 0; i < n_pattern; i++) {
        const int32_t token = this->token(begin + static_cast<int64_t>(i));
        if (token != pattern[i]) {
            return token < pattern[i] ? -1 : 1;
        }
    }
    return 0;
}

Datastore::Range Datastore::find(const int32_t * pattern, size_t n_pattern) const {
    // The first rank in [begin, end) whose suffix compares with the pattern as `limit` or more.
    const auto first = [&](int64_t begin, int64_t end, int limit) {
        while (begin < end) {
            const int64_t middle = begin + (end - begin) / 2;
            if (compare(middle, pattern, n_pattern) < limit) {
                begin = middle + 1;
            } else {
                end = middle;
            }
        }
        return begin;
    };
    const int64_t begin = first(0, n(), 0);
    if (begin == n() || compare(begin, pattern, n_pattern) != 0) {
        return {begin, begin};
    }
    // Most patterns are rare: look near the first one before everywhere.
    int64_t step = 1;
    while (begin + step < n() && compare(begin + step, pattern, n_pattern) == 0) {
        step *= 2;
    }
    return {begin, first(begin + step / 2, std::min(n(), begin + step), 1)};
}

} // namespace pyfly

extern "C" pyfly_status pyfly_store_build(const int32_t * tokens, size_t n_tokens, int32_t n_vocab, uint64_t vocabulary,
                                          pyfly_store_progress progress, void * user, uint8_t * header,
                                          int32_t * suffixes, pyfly_error * error) {
    return pyfly::guard(error, [&] {
        using pyfly::Error;
        if (n_tokens < 1) {
            throw Error(PYFLY_STATUS_INVALID, "there is nothing to build a datastore from: no tokens");
        }
        if (n_vocab < 1 || n_vocab == INT32_MAX || n_tokens > static_cast<size_t>(INT32_MAX)) {
            throw Error(PYFLY_STATUS_INVALID, "a datastore holds at most " + std::to_string(INT32_MAX) +
                                                  " tokens, not " + std::to_string(n_tokens) + "; build several");
        }
        for (size_t i = 0; i < n_tokens; i++) {
            if (tokens[i] < pyfly::Datastore::separator || tokens[i] >= n_vocab) {
                throw Error(PYFLY_STATUS_INVALID, "token " + std::to_string(tokens[i]) +
                                                      " is outside the vocabulary of " + std::to_string(n_vocab));
            }
        }
        const auto report = [&](double done) {
            if (progress != nullptr && progress(user, done) != 0) {
                throw Error(PYFLY_STATUS_CALLBACK, "building was stopped");
            }
        };
        pyfly::sort_suffixes(tokens, static_cast<int32_t>(n_tokens), n_vocab, suffixes, report);
        pyfly::Header out = {};
        std::memcpy(out.magic, pyfly::magic, sizeof(out.magic));
        out.version = pyfly::version;
        out.n_vocab = n_vocab;
        out.n_tokens = static_cast<int64_t>(n_tokens);
        out.vocabulary = vocabulary;
        out.checksum = pyfly::checksum(suffixes, n_tokens, pyfly::checksum(tokens, n_tokens));
        out.header_checksum = pyfly::header_checksum(out);
        std::memcpy(header, &out, sizeof(out));
    });
}

extern "C" pyfly_status pyfly_store_read(const void * data, size_t n_bytes, int32_t reads_all, pyfly_store_info * out,
                                         pyfly_error * error) {
    return pyfly::guard(error, [&] {
        const pyfly::Datastore store(data, n_bytes);
        if (reads_all != 0 && !store.is_intact()) {
            throw pyfly::Error(PYFLY_STATUS_INVALID, "the datastore is damaged; build it again");
        }
        *out = store.info();
    });
}
