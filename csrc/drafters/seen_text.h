// What a head saw the target evaluate of one text: the tokens, and the target's hidden states at the last of them. No
// llama.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pyfly {

// How many tokens of a[n_a] and b[n_b] agree.
inline size_t n_common(const int32_t * a, size_t n_a, const int32_t * b, size_t n_b) {
    return static_cast<size_t>(std::mismatch(a, a + std::min(n_a, n_b), b).first - a);
}

class SeenText {
  public:
    // Floats of a row.
    explicit SeenText(size_t row_width) : row_width_(row_width) {}

    // The positions that were seen without a gap are begin() ... end() - 1; of those from rows_begin() on there are
    // rows.
    size_t begin() const { return begin_; }
    size_t end() const { return begin_ + tokens_.size(); }
    size_t rows_begin() const { return rows_begin_; }
    const std::vector<int32_t> & tokens() const { return tokens_; } // from begin() on

    // The row of a position. Requires rows_begin() <= position < end().
    const float * row(size_t position) const { return rows_.data() + (position - rows_begin_) * row_width_; }

    // Whether the row is there that goes with the token at `position`: that of the one before it, if there is one.
    bool has_row_before(size_t position) const {
        return position == 0 || (position > rows_begin_ && position <= end());
    }

    // Nothing was seen before `position`.
    void restart(size_t position) {
        begin_ = rows_begin_ = position;
        tokens_.clear();
        rows_.clear();
    }

    // Keeps what was seen of the first n positions. Requires begin() <= n <= end().
    void cut(size_t n) {
        tokens_.resize(n - begin_);
        rows_begin_ = std::min(rows_begin_, n);
        rows_.resize((n - rows_begin_) * row_width_);
    }

    // Appends tokens[n]; returns where their rows [n][row_width] are to be written.
    float * append(const int32_t * tokens, size_t n) {
        tokens_.insert(tokens_.end(), tokens, tokens + n);
        rows_.resize(rows_.size() + n * row_width_);
        return rows_.data() + rows_.size() - n * row_width_;
    }

    // Drops the rows of positions before `position`.
    void drop_rows(size_t position) {
        if (position > rows_begin_) {
            rows_.erase(rows_.begin(),
                        rows_.begin() + static_cast<std::ptrdiff_t>((position - rows_begin_) * row_width_));
            rows_begin_ = position;
        }
    }

  private:
    size_t row_width_;
    size_t begin_ = 0;
    std::vector<int32_t> tokens_;
    size_t rows_begin_ = 0;
    std::vector<float> rows_; // of positions rows_begin_ ... end() - 1
};

} // namespace pyfly
