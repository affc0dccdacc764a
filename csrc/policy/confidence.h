// How likely a draft's token is right, by the drafter's probability of its most probable token: that probability, times
// how much more often its tokens were right than it said, corrected by the outcomes of earlier tokens with about the
// same one.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

namespace pyfly {

class Confidence {
  public:
    struct Rates {
        double memory = 0.998; // of the counts, kept per observation
        double weight = 8.0;   // observations that the drafter's own probability is worth
    };

    explicit Confidence(const Rates & rates) : rates_(rates) {}

    // The probability that a token with the drafter's probability p, 0..1, is right, given that those before it are.
    double right(double p) const;

    // That the token behind such a token is right, given that this one is.
    double next(double p) const;

    // The first n_right tokens of a draft with the probabilities p were right and, if is_refuted, the one behind them,
    // if there is one, was not.
    void observe(const std::vector<float> & p, size_t n_right, bool is_refuted);

  private:
    static constexpr size_t n_bins = 10; // of p, equally wide
    struct Bin {
        double right = 0.0, seen = 0.0;
    };
    using Bins = std::array<Bin, n_bins>;

    static size_t bin(double p);
    void count(Bin & bin, bool is_right, double expected = 1.0) const;

    Rates rates_;
    Bins own_ = {}, next_ = {};
    Bin all_ = {}; // right ones, and how many were expected
};

} // namespace pyfly
