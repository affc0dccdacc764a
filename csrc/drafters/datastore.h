// A text of the user's own, kept so that what followed some tokens in it is found at once. No llama.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pyfly.h"
#include "suffix_array.h"

namespace pyfly {

// Reads a datastore where it lies (a mapped file, say; see pyfly_store_build for what is in it). The memory is
// borrowed. Nothing is read beforehand but the header, and every position that is read is checked: whatever the rest
// holds, nothing outside the memory is read, and what is found is at worst wrong.
class Datastore {
  public:
    static constexpr int32_t separator = -1; // between two documents; no continuation crosses it

    // Throws Error(PYFLY_STATUS_INVALID) unless the header is whole, of this version, and fits the size.
    Datastore(const void * data, size_t n_bytes);

    int64_t n() const { return info_.n_tokens; }
    const pyfly_store_info & info() const { return info_; }

    // Whether all of it is as it was built; reads everything.
    bool is_intact() const;

    // The token at `position`, the separator where there is none.
    int32_t token(int64_t position) const;

    // Where the suffix of a rank, 0 <= rank < n(), begins: the smallest suffix has rank 0.
    int64_t suffix(int64_t rank) const;

    // The ranks of the suffixes that begin with pattern[n].
    struct Range {
        int64_t begin, end;
        int64_t size() const { return end - begin; }
    };
    Range find(const int32_t * pattern, size_t n) const;

  private:
    int32_t number(int64_t i) const; // of the tokens and then the suffixes
    int compare(int64_t rank, const int32_t * pattern, size_t n) const;

    const uint8_t * data_; // behind the header
    uint64_t checksum_;
    pyfly_store_info info_;
};

} // namespace pyfly
