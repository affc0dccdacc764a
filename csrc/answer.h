// What rules may know of an answer so far: how long it is, and what was given away in it. No llama.h.
#pragma once

#include <cstdint>
#include <vector>

namespace pyfly {

class Answer {
  public:
    // It begins at this position.
    explicit Answer(int64_t begin = 0) : begin_(begin) {}

    int64_t begin() const { return begin_; }

    // Tokens before `position`.
    int64_t n(int64_t position) const { return position - begin_; }

    // Nats: the margins of its loosely accepted tokens, provisional ones too.
    double given_away() const { return loose_.empty() ? 0.0 : loose_.back().sum; }

    // A token at `position`, behind all others, is accepted loosely.
    void accept_loosely(int64_t position, double margin) { loose_.push_back({position, given_away() + margin}); }

    // The tokens from `position` on go.
    void truncate(int64_t position) {
        while (!loose_.empty() && loose_.back().position >= position) {
            loose_.pop_back();
        }
    }

  private:
    struct Loose {
        int64_t position;
        double sum; // of the margins up to here
    };

    int64_t begin_;
    std::vector<Loose> loose_;
};

} // namespace pyfly
