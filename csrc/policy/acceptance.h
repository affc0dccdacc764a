// How likely a drafter's proposals are accepted: of each request by what was seen of it lately, and before that by what
// was seen of all requests. By class of proposal and by depth.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "pyfly.h"

namespace pyfly {

class Acceptance {
  public:
    static constexpr int32_t n_classes = 8; // of proposals told apart, see Proposal

    struct Rates {
        double memory = 0.85;        // of a request's counts, kept per observation
        double memory_of_all = 0.98; // of the counts of all requests
        double weight_of_all = 4.0;  // observations of a request that what is known of all requests is worth
        double first = 0.7;          // believed of a drafter that was never seen, as if it had been once
        double inherit = 0.5; // how much of what is believed of a depth comes from the request's own depth before it
    };

    explicit Acceptance(const Rates & rates) : rates_(rates) {}

    void begin_request(int32_t slot);

    // n_accepted of n_drafted were accepted in order; the next one, if there is one, was not.
    void observe(int32_t slot, int32_t proposal_class, int32_t n_drafted, int32_t n_accepted);

    // The same of a draft whose tokens' probabilities are known, before anything was verified: the first i + 1 of them
    // are all right with the probability reached[i]; n_asked, of which those without a probability were not verified.
    // It is what the outcomes of such drafts are on average, without their chance. Class 0.
    void expect(int32_t slot, int32_t n_asked, const std::vector<double> & reached);

    // reached[i], for i < k: the probability that the first i + 1 drafts are all accepted.
    void reach(int32_t slot, int32_t proposal_class, int32_t k, double * reached) const;

    // Whether anything was observed, of any request.
    bool was_seen() const;

    // At depths 1..k, given that those before are accepted: of all requests and of the class that was seen most of
    // late.
    void of_all(int32_t k, double * at_depth) const;

    // A draft of n_asked tokens that might end earlier: so many were drafted, so many verified.
    void observe_length(int32_t slot, int32_t n_asked, int32_t n_drafted, int32_t n_verified);

    // drafted[i], verified[i], for i < k: the probability that a draft of k tokens has more than i drafted, and
    // verified. request < 0: of all requests.
    void lengths(int32_t slot, int32_t k, double * drafted, double * verified) const;

  private:
    struct Counts {
        std::array<double, PYFLY_MAX_DEPTH> accepted = {}, seen = {};

        // At depth i + 1, 0 <= n_accepted <= n_seen <= 1.
        void count(int32_t i, double n_seen, double n_accepted, double memory);
        double at(int32_t i, double prior, double weight) const {
            const size_t depth = static_cast<size_t>(i);
            return (accepted[depth] + weight * prior) / (seen[depth] + weight);
        }
    };
    struct Seen {
        std::array<Counts, n_classes> classes = {};
        Counts drafted = {}, verified = {}; // of drafts that may end earlier
    };

    static size_t index(int32_t proposal_class);
    void count(Counts & own, Counts & all, int32_t i, double n_seen, double n_accepted) const;
    Seen & of(int32_t slot);
    const Seen * find(int32_t slot) const; // nullptr: nothing of it was seen

    Rates rates_;
    Seen all_ = {};
    std::vector<Seen> requests_;
};

} // namespace pyfly
