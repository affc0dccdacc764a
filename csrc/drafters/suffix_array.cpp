#include "suffix_array.h"

#include <algorithm>
#include <vector>

namespace pyfly {

namespace {

constexpr int32_t none = -1;

// Counts passes over the text against what they are expected to be.
class Progress {
  public:
    Progress(const OnProgress & report, int64_t n_expected) : report_(report), n_expected_(n_expected) {}

    void step() {
        if ((++n_done_ & 0xfffff) == 0) {
            report_(std::min(1.0, static_cast<double>(n_done_) / static_cast<double>(n_expected_)));
        }
    }

  private:
    const OnProgress & report_;
    int64_t n_expected_, n_done_ = 0;
};

// One level: a text, and where its suffixes are sorted. A suffix is of type S where it is smaller than the next one,
// else L; the last one is L, as if something smaller than every symbol followed. An S behind an L is called leftmost.
class Level {
  public:
    Level(const int32_t * text, int32_t n, int32_t n_symbols, int32_t * sorted, Progress & progress)
        : text_(text), n_(n), sorted_(sorted), progress_(progress), is_s_(static_cast<size_t>(n), false),
          bucket_(static_cast<size_t>(n_symbols) + 1) {
        for (int32_t i = n - 2; i >= 0; i--) {
            is_s_[at(i)] = text[i] != text[i + 1] ? text[i] < text[i + 1] : is_s_[at(i + 1)];
        }
    }

    void sort() {
        std::fill_n(sorted_, n_, none);
        point_to_ends();
        for (int32_t i = 1; i < n_; i++) {
            if (is_leftmost(i)) {
                sorted_[--bucket(i)] = i;
            }
        }
        induce(); // sorts the leftmost by what they begin with, up to the next leftmost
        const int32_t n_leftmost = sort_leftmost();
        std::fill(sorted_ + n_leftmost, sorted_ + n_, none);
        point_to_ends();
        for (int32_t i = n_leftmost - 1; i >= 0; i--) {
            const int32_t suffix = sorted_[i];
            sorted_[i] = none;
            sorted_[--bucket(suffix)] = suffix;
        }
        induce();
    }

  private:
    static size_t at(int32_t i) { return static_cast<size_t>(i); }
    bool is_leftmost(int32_t i) const { return i > 0 && is_s_[at(i)] && !is_s_[at(i - 1)]; }

    int32_t & bucket(int32_t suffix) { return bucket_[at(text_[suffix] + 1)]; }

    void count() {
        std::fill(bucket_.begin(), bucket_.end(), 0);
        for (int32_t i = 0; i < n_; i++) {
            bucket(i)++;
        }
    }

    void point_to_begins() {
        count();
        int32_t sum = 0;
        for (int32_t & n : bucket_) {
            const int32_t size = n;
            n = sum;
            sum += size;
        }
    }

    void point_to_ends() {
        count();
        int32_t sum = 0;
        for (int32_t & n : bucket_) {
            n = sum += n;
        }
    }

    // From the order of the leftmost follows that of the L, and from that the order of the S.
    void induce() {
        point_to_begins();
        sorted_[bucket(n_ - 1)++] = n_ - 1;
        for (int32_t i = 0; i < n_; i++, progress_.step()) {
            const int32_t before = sorted_[i] - 1;
            if (before >= 0 && !is_s_[at(before)]) {
                sorted_[bucket(before)++] = before;
            }
        }
        point_to_ends();
        for (int32_t i = n_ - 1; i >= 0; i--, progress_.step()) {
            const int32_t before = sorted_[i] - 1;
            if (before >= 0 && is_s_[at(before)]) {
                sorted_[--bucket(before)] = before;
            }
        }
    }

    // Whether two leftmost begin alike up to their next leftmost.
    bool is_same(int32_t a, int32_t b) const {
        for (int32_t i = 0;; i++) {
            if (a + i == n_ || b + i == n_ || text_[a + i] != text_[b + i] || is_s_[at(a + i)] != is_s_[at(b + i)]) {
                return false;
            }
            if (i > 0 && (is_leftmost(a + i) || is_leftmost(b + i))) {
                return is_leftmost(a + i) && is_leftmost(b + i);
            }
        }
    }

    // Leaves the leftmost suffixes, sorted, at the beginning of sorted_; returns how many there are. What they begin
    // with gets a name, in order; the names are a text of at most half the length, kept at the end of sorted_.
    int32_t sort_leftmost() {
        int32_t n_leftmost = 0;
        for (int32_t i = 0; i < n_; i++) {
            if (is_leftmost(sorted_[i])) {
                sorted_[n_leftmost++] = sorted_[i];
            }
        }
        std::fill(sorted_ + n_leftmost, sorted_ + n_, none);
        int32_t n_names = 0;
        for (int32_t i = 0; i < n_leftmost; i++) {
            n_names += i == 0 || !is_same(sorted_[i - 1], sorted_[i]) ? 1 : 0;
            sorted_[n_leftmost + sorted_[i] / 2] = n_names - 1; // two leftmost are never neighbours
        }
        int32_t * names = sorted_ + n_;
        for (int32_t i = n_ - 1; i >= n_leftmost; i--) {
            if (sorted_[i] != none) {
                *--names = sorted_[i];
            }
        }
        if (n_names < n_leftmost) {
            Level(names, n_leftmost, n_names, sorted_, progress_).sort();
        } else {
            for (int32_t i = 0; i < n_leftmost; i++) {
                sorted_[names[i]] = i;
            }
        }
        int32_t n = n_leftmost;
        for (int32_t i = n_ - 1; i > 0; i--) { // the names have served: here are the positions they stood for
            if (is_leftmost(i)) {
                names[--n] = i;
            }
        }
        for (int32_t i = 0; i < n_leftmost; i++) {
            sorted_[i] = names[sorted_[i]];
        }
        return n_leftmost;
    }

    const int32_t * text_;
    int32_t n_;
    int32_t * sorted_;
    Progress & progress_;
    std::vector<bool> is_s_;
    std::vector<int32_t> bucket_; // by symbol + 1: begin or end of its suffixes in sorted_
};

} // namespace

void sort_suffixes(const int32_t * text, int32_t n, int32_t n_symbols, int32_t * sorted, const OnProgress & progress) {
    if (n > 0) {
        Progress steps(progress, 6 * static_cast<int64_t>(n));
        Level(text, n, n_symbols, sorted, steps).sort();
    }
}

} // namespace pyfly
