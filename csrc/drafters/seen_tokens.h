// What a head saw the target evaluate of one request: the tokens, and the target's hidden states at the last of them.
// No llama.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "stretch.h"

namespace pyfly {

class SeenTokens {
  public:
    // Floats of a row.
    explicit SeenTokens(size_t row_width) : row_width_(row_width) {}

    // The stretch (stretch.h) that was seen without a gap is begin() ... end() - 1; of its positions from rows_begin()
    // on there are rows.
    size_t begin() const { return begin_; }
    size_t end() const { return begin_ + tokens_.size(); }
    size_t rows_begin() const { return rows_begin_; }
    const std::vector<int32_t> & tokens() const { return tokens_; } // from begin() on

    // The row of a position. Requires rows_begin() <= position < end().
    const float * row(size_t position) const { return rows_.data() + (position - rows_begin_) * row_width_; }

    // Whether the rows from the one before `position` on are there; nothing is before 0.
    bool has_row_before(size_t position) const {
        return position == 0 ? rows_begin_ == 0 : position > rows_begin_ && position <= end();
    }

    // The same once what was seen is cut to its first `position` tokens.
    bool will_have_row_before(size_t position) const {
        return has_row_before(position) ||
               std::any_of(marks_.begin(), marks_.end(), [&](const Mark & mark) { return mark.n == position; });
    }

    // Nothing was seen before `position`.
    void restart(size_t position) {
        begin_ = rows_begin_ = position;
        tokens_.clear();
        rows_.clear();
        marks_.clear();
    }

    // Keeps what was seen of the first n positions; all of it if that is less. Where nothing stays, it begins at 0.
    void cut(size_t n) {
        if (n <= begin_) {
            restart(n == begin_ ? n : 0);
            return;
        }
        tokens_.resize(std::min(tokens_.size(), n - begin_));
        while (!marks_.empty() && marks_.back().n > n) {
            marks_.pop_back();
        }
        if (end() <= rows_begin_) {
            const bool is_marked = !marks_.empty() && marks_.back().n == end();
            rows_begin_ = end() - (is_marked ? 1 : 0);
            rows_ = is_marked ? marks_.back().row : std::vector<float>();
        }
        rows_.resize((end() - rows_begin_) * row_width_);
    }

    // Keeps what was seen of history[n].
    void follow(const int32_t * history, size_t n) {
        const size_t n_stays = n_staying(begin_, tokens_.data(), tokens_.size(), history, n);
        cut(n_stays > 0 ? begin_ + n_stays : 0);
    }

    // What was seen may be cut to what it is now, however long it was in between: the last row is kept for that. Of the
    // places where that was said before, those stay that is_wanted(tokens seen there).
    template <typename IsWanted> void mark(const IsWanted & is_wanted) {
        const size_t n = end();
        marks_.erase(std::remove_if(marks_.begin(), marks_.end(),
                                    [&](const Mark & mark) { return mark.n == n || !is_wanted(mark.n); }),
                     marks_.end());
        if (n > rows_begin_) {
            marks_.push_back({n, {row(n - 1), row(n - 1) + row_width_}});
        }
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
    // A place that it may be cut to.
    struct Mark {
        size_t n;               // tokens seen there
        std::vector<float> row; // of the last of them
    };

    size_t row_width_;
    size_t begin_ = 0;
    std::vector<int32_t> tokens_;
    size_t rows_begin_ = 0;
    std::vector<float> rows_; // of positions rows_begin_ ... end() - 1
    std::vector<Mark> marks_; // by n, ascending, at most end()
};

} // namespace pyfly
