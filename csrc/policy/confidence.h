// How likely a draft's token is right, by how probable the drafter finds its most probable token: what it says itself,
// put right by what came of it.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

namespace pyfly {

class Confidence {
  public:
    struct Rates {
        double memory = 0.998; // of the counts, kept per observation
        double weight = 8.0;   // observations that the drafter's own word is worth
    };

    explicit Confidence(const Rates & rates) : rates_(rates) {}

    // That a token of which the drafter says p, 0..1, is right, given that those before it are.
    double right(double p) const;

    // That the token behind such a one is right, given that this one is.
    double next(double p) const;

    // Of the tokens of a draft, of which the drafter said p[0], p[1], ..., the first n_right were right and, if
    // is_refuted, the one behind them, if there is one, was not.
    void observe(const std::vector<float> & p, size_t n_right, bool is_refuted);

  private:
    static constexpr size_t n_bins = 10; // of p, equally wide
    struct Bin {
        double right = 0.0, seen = 0.0;
    };
    using Bins = std::array<Bin, n_bins>;

    static size_t bin(double p);
    void count(Bin & bin, bool is_right) const;

    Rates rates_;
    Bins own_ = {}, next_ = {};
};

} // namespace pyfly
