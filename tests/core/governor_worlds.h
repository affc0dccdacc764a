// Simulated worlds for the governor's tests: machines whose costs are known, texts whose every
// position says beforehand whether a draft would be right there. Policies that are compared meet the same texts. No
// clock is read.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "confidence.h"
#include "policy.h"

namespace worlds {

using pyfly::Candidate;
using pyfly::Choice;
using pyfly::Offer;
using pyfly::Policy;

// What things take, in microseconds.
struct Machine {
    std::string name;
    std::function<double(int32_t)> target; // a batch of n rows
    double draft = 0.0;                    // a step of the draft model for one text
    double draft_slope = 0.15;             // how much more for each other text
    double draft_start = 0.3;              // of a step, that the first step of a draft takes in addition
    double catch_up = 0.0;                 // a token that the draft model has missed
    double change = 0.0;                   // how much more for a batch whose size is not that of the one before

    // Of asked[i] tokens for the i-th text.
    double drafting(const std::vector<int32_t> & asked) const {
        double us = 0.0;
        for (int32_t depth = 1;; depth++) {
            const auto n = std::count_if(asked.begin(), asked.end(), [&](int32_t k) { return k >= depth; });
            if (n == 0) {
                return us;
            }
            us += draft * (1.0 + draft_slope * static_cast<double>(n - 1)) * (depth == 1 ? 1.0 + draft_start : 1.0);
        }
    }
};

// A text, position by position.
struct Text {
    struct Place {
        double model = 0.0, lookup = 0.0; // how likely a draft is right, given that those before it are
        double model_u = 0.0, lookup_u = 0.0;
        int32_t lookup_class = -1; // -1: prompt lookup has no proposal
    };
    std::vector<Place> places;
    double deeper = 1.0; // acceptance of the model falls by this with each depth
};

struct Drafters {
    bool lookup = false, model = false;
    bool is_head = false; // the model has nothing to catch up with
    double noise = 1.0;   // share of chance in the model's confidence, 0..1; 1: its drafts are not stopped
};

constexpr int32_t k_max = 10, n_prompt = 150;

struct Result {
    double us = 0.0;
    int64_t tokens = 0;
    std::vector<int32_t> k; // of each text and step
    double speed() const { return static_cast<double>(tokens) / us; }
};

// Decodes the texts, n_slots at once. Times are shown to the policy with noise, and now and then a spike; they count
// without it.
inline Result decode(const Machine & machine, const Drafters & drafters, const std::vector<Text> & texts,
                     size_t n_slots, Policy & policy, double noise = 0.04, uint32_t seed = 7) {
    constexpr int32_t lookup = 0;
    const int32_t model = drafters.lookup ? 1 : 0;
    struct Slot {
        const Text * text = nullptr;
        size_t position = 0, synced = 0;
        size_t shadowed = 0; // up to where a proposal that was not verified is being followed
    };
    Result result;
    std::mt19937 rng(seed);
    std::normal_distribution<double> normal(0.0, 1.0);
    const auto measured = [&](double us) {
        const bool spike = noise > 0.0 && rng() % 200 == 0;
        return us * std::exp(noise * normal(rng)) * (spike ? 4.0 : 1.0);
    };
    const auto run_of = [](const Text & text, size_t position, bool of_lookup, int32_t k) {
        int32_t n = 0;
        double deeper = 1.0;
        while (n < k && position + static_cast<size_t>(n) < text.places.size()) {
            const Text::Place & place = text.places[position + static_cast<size_t>(n)];
            if (of_lookup ? place.lookup_u >= place.lookup : place.model_u >= place.model * deeper) {
                break;
            }
            deeper *= text.deeper;
            n++;
        }
        return n;
    };
    std::vector<Slot> slots(n_slots);
    size_t n_begun = 0;
    int32_t n_rows_before = 1;
    const int32_t n_at_once = static_cast<int32_t>(std::min(n_slots, texts.size()));
    while (true) {
        std::vector<Candidate> candidates;
        for (size_t i = 0; i < n_slots; i++) {
            Slot & slot = slots[i];
            if (slot.text == nullptr && n_begun < texts.size()) {
                slot = {&texts[n_begun++], 0, 0, 0};
                policy.begin_request(static_cast<int32_t>(i));
                const bool is_behind = drafters.model && !drafters.is_head;
                const bool follows =
                    is_behind && policy.pays_to_follow(static_cast<int32_t>(i), model, k_max, n_at_once, n_prompt);
                slot.synced = is_behind && !follows ? SIZE_MAX : 0;
                if (follows) {
                    const double us = machine.catch_up * n_prompt;
                    result.us += us;
                    policy.observe_catch_up(model, n_prompt, measured(us));
                }
            }
            if (slot.text == nullptr) {
                continue;
            }
            Candidate & candidate = candidates.emplace_back();
            candidate.slot = static_cast<int32_t>(i);
            const int32_t room = static_cast<int32_t>(slot.text->places.size() - slot.position) - 1;
            const Text::Place & here = slot.text->places[slot.position];
            if (drafters.lookup && room > 0 && here.lookup_class >= 0) {
                candidate.offers.push_back({lookup, std::min(room, k_max), here.lookup_class, 0});
            }
            if (drafters.model && room > 0) {
                const size_t behind = slot.synced == SIZE_MAX ? slot.position + n_prompt : slot.position - slot.synced;
                candidate.offers.push_back({model, std::min(room, k_max), 0,
                                            drafters.is_head ? 0 : static_cast<int64_t>(behind > 1 ? behind : 0)});
            }
        }
        if (candidates.empty()) {
            return result;
        }
        std::vector<Choice> choices = policy.choose(candidates);
        std::vector<std::vector<float>> confidence(choices.size());
        std::vector<bool> is_dropped(choices.size());
        const std::vector<Choice> chosen = choices;
        for (size_t i = 0; i < choices.size(); i++) {
            Choice & choice = choices[i];
            if (choice.k == 0 || choice.drafter != model || !drafters.model || drafters.noise == 1.0) {
                continue;
            }
            const Slot & slot = slots[static_cast<size_t>(candidates[i].slot)];
            const auto stop = policy.stop(model, choice.k);
            double deeper = 1.0;
            for (int32_t n = 0; stop && n < choice.k; n++) {
                const double p = slot.text->places[slot.position + static_cast<size_t>(n)].model * deeper;
                deeper *= slot.text->deeper;
                const double guess = p + drafters.noise * (std::uniform_real_distribution<double>(0.0, 1.0)(rng) - p);
                confidence[i].push_back(static_cast<float>(guess));
                const auto step = stop(guess);
                is_dropped[i] = step == pyfly::DraftStep::ends_before;
                if (step != pyfly::DraftStep::goes_on) {
                    choice.k = n + (is_dropped[i] ? 0 : 1);
                }
            }
        }
        int32_t n_rows = static_cast<int32_t>(candidates.size());
        std::vector<int32_t> asked;
        int64_t n_missed = 0;
        for (size_t i = 0; i < choices.size(); i++) {
            n_rows += choices[i].k;
            if (chosen[i].k > 0 && drafters.model && choices[i].drafter == model) {
                asked.push_back(confidence[i].empty() ? choices[i].k : static_cast<int32_t>(confidence[i].size()));
                for (const Offer & offer : candidates[i].offers) {
                    n_missed += offer.drafter == model ? offer.n_behind : 0;
                }
            }
        }
        if (n_missed > 0) {
            const double us = machine.catch_up * static_cast<double>(n_missed);
            result.us += us;
            policy.observe_catch_up(model, n_missed, measured(us));
        }
        if (!asked.empty()) {
            result.us += machine.drafting(asked);
            policy.observe_draft(model, asked, measured(machine.drafting(asked)));
        }
        const double us = machine.target(n_rows) + (n_rows == n_rows_before ? 0.0 : machine.change);
        n_rows_before = n_rows;
        result.us += us;
        policy.observe_target(n_rows, measured(us));
        for (size_t i = 0; i < choices.size(); i++) {
            Slot & slot = slots[static_cast<size_t>(candidates[i].slot)];
            const Choice choice = choices[i];
            const bool by_lookup = drafters.lookup && choice.drafter == lookup && choice.k > 0;
            const Text::Place & here = slot.text->places[slot.position];
            const int32_t room = static_cast<int32_t>(slot.text->places.size() - slot.position) - 1;
            int32_t accepted = 0;
            if (chosen[i].k > 0) {
                accepted = run_of(*slot.text, slot.position, by_lookup, choice.k);
            }
            if (chosen[i].k > 0 && confidence[i].empty()) {
                policy.observe_acceptance(candidates[i].slot, choice.drafter, by_lookup ? here.lookup_class : 0,
                                          chosen[i].k, accepted);
            }
            if (!confidence[i].empty()) {
                const bool is_right = is_dropped[i] && accepted == choice.k &&
                                      run_of(*slot.text, slot.position, false, choice.k + 1) > choice.k;
                policy.observe_confidence(candidates[i].slot, model, confidence[i], chosen[i].k, choice.k,
                                          static_cast<size_t>(accepted + (is_right ? 1 : 0)),
                                          !is_right && (accepted < choice.k || is_dropped[i]));
            }
            if (drafters.lookup && !by_lookup && here.lookup_class >= 0 && room > 0 && slot.position >= slot.shadowed) {
                const int32_t n = std::min(room, k_max), right = run_of(*slot.text, slot.position, true, n);
                policy.observe_acceptance(candidates[i].slot, lookup, here.lookup_class, n, right);
                slot.shadowed = slot.position + static_cast<size_t>(right) + 1;
            }
            slot.position += static_cast<size_t>(accepted) + 1;
            if (chosen[i].k > 0 && !by_lookup) {
                slot.synced = slot.position;
            }
            result.tokens += accepted + 1;
            result.k.push_back(choice.k);
            if (slot.position >= slot.text->places.size()) {
                slot.text = nullptr;
            }
        }
    }
}

// K tokens for each text, by the first drafter that has something.
class Fixed : public Policy {
  public:
    explicit Fixed(int32_t k) : k_(k) {}
    std::vector<Choice> choose(const std::vector<Candidate> & candidates) override {
        std::vector<Choice> choices;
        for (const Candidate & candidate : candidates) {
            choices.push_back(candidate.offers.empty() || k_ == 0
                                  ? Choice{}
                                  : Choice{candidate.offers[0].drafter, std::min(k_, candidate.offers[0].k_max)});
        }
        return choices;
    }

    bool pays_to_follow(int32_t, int32_t, int32_t, int32_t, int64_t) override { return k_ > 0; }

  private:
    int32_t k_;
};

// exllamav3's `dynamic_draft_tokens`, as its Generator describes it (turboderp-org/exllamav3, commit 00c091e,
// exllamav3/generator/generator.py): a draft is just longer than a moving average of how many tokens were accepted. It
// follows a new number by 1.3 times the difference upwards, 0.65 times downwards; a draft that was accepted whole
// counts as one token more; under 0.3 there is a draft in 16 steps only. Costs play no part.
class MovingAverage : public Policy {
  public:
    explicit MovingAverage(int32_t longest = k_max) : longest_(longest) {}
    std::vector<Choice> choose(const std::vector<Candidate> & candidates) override {
        std::vector<Choice> choices(candidates.size());
        for (size_t i = 0; i < candidates.size(); i++) {
            if (candidates[i].offers.empty()) {
                continue;
            }
            const Offer & offer = candidates[i].offers[0];
            Average & average = of(candidates[i].slot, offer.drafter);
            average.n_waited = average.tokens < 0.3 ? average.n_waited + 1 : 0;
            if (average.n_waited == 0 || average.n_waited >= 16) {
                const int32_t k = static_cast<int32_t>(std::max(average.tokens, 0.0)) + 1;
                choices[i] = {offer.drafter, std::min({k, longest_, offer.k_max})};
                average.n_waited = 0;
            }
        }
        return choices;
    }
    void begin_request(int32_t slot) override {
        averages_.erase(averages_.lower_bound({slot, 0}), averages_.upper_bound({slot, INT32_MAX}));
    }
    void observe_acceptance(int32_t slot, int32_t drafter, int32_t, int32_t n_drafted, int32_t n_accepted) override {
        Average & average = of(slot, drafter);
        const double tokens = n_accepted + (n_accepted == n_drafted ? 1 : 0);
        average.tokens += (tokens > average.tokens ? 1.3 : 0.65) * (tokens - average.tokens);
    }

  private:
    struct Average {
        double tokens = 0.0;
        int32_t n_waited = 0; // steps without a draft
    };
    Average & of(int32_t slot, int32_t drafter) {
        return averages_.try_emplace({slot, drafter}, Average{static_cast<double>(longest_), 0}).first->second;
    }

    int32_t longest_;
    std::map<std::pair<int32_t, int32_t>, Average> averages_;
};

// What came after it (`draft_confidence`, as in bsvinay/exllamav3-rocm-moe, commit 32f8418): a draft in every step,
// which ends as soon as its tokens are all right with a probability under 0.4, by the drafter's probabilities and the
// outcomes of earlier ones. A drafter without probabilities has the moving average.
class Threshold : public MovingAverage {
  public:
    explicit Threshold(int32_t longest = k_max) : MovingAverage(longest) {}
    std::vector<Choice> choose(const std::vector<Candidate> & candidates) override {
        std::vector<Choice> choices = MovingAverage::choose(candidates);
        for (size_t i = 0; i < candidates.size(); i++) {
            for (const Offer & offer : candidates[i].offers) {
                if (offer.drafter == drafter_ && (choices[i].k == 0 || choices[i].drafter == drafter_)) {
                    choices[i] = {drafter_, offer.k_max};
                }
            }
        }
        return choices;
    }
    pyfly::DraftStop stop(int32_t, int32_t) override {
        return [this, reached = 1.0](double p) mutable {
            reached *= confidence_.right(p);
            return reached < 0.4 ? pyfly::DraftStep::ends_behind : pyfly::DraftStep::goes_on;
        };
    }
    void observe_confidence(int32_t, int32_t drafter, const std::vector<float> & confidence, int32_t, int32_t,
                            size_t n_right, bool is_refuted) override {
        drafter_ = drafter;
        confidence_.observe(confidence, n_right, is_refuted);
    }

  private:
    int32_t drafter_ = -1; // that has confidences
    pyfly::Confidence confidence_ = pyfly::Confidence({});
};

// Kinds of text: how acceptance runs through n positions.
inline std::vector<Text> texts_of(const std::string & kind, double level, size_t n_texts, size_t length,
                                  uint32_t seed) {
    std::mt19937 rng(seed);
    std::uniform_real_distribution<double> uniform(0.0, 1.0);
    std::vector<Text> texts(n_texts);
    for (size_t t = 0; t < n_texts; t++) {
        Text & text = texts[t];
        text.places.resize(length);
        text.deeper = kind == "deeper" ? 0.85 : 1.0;
        const double of_this = kind == "mixture" ? std::vector<double>{0.2, 0.6, 0.9}[rng() % 3] : level;
        bool is_easy = rng() % 2;
        int32_t lookup_left = 0, lookup_class = -1;
        for (size_t i = 0; i < length; i++) {
            Text::Place & place = text.places[i];
            place.model_u = uniform(rng);
            place.lookup_u = uniform(rng);
            if (rng() % 15 == 0) {
                is_easy = !is_easy;
            }
            place.model = kind == "uneven"      ? (uniform(rng) < level ? 0.95 : 0.15)
                          : kind == "stretches" ? (is_easy ? 0.97 : level)
                          : kind == "change"    ? ((i < length / 2) == (t % 2 == 0) ? level : 1.0 - level)
                                                : of_this;
            // Lookup has something in stretches; long n-grams are right more often.
            if (lookup_left-- <= 0) {
                lookup_left = 4 + static_cast<int32_t>(rng() % 20);
                lookup_class = rng() % 3 == 0 ? -1 : static_cast<int32_t>(rng() % 4);
            }
            place.lookup_class = lookup_class;
            place.lookup = lookup_class < 0 ? 0.0 : std::min(0.97, place.model * (0.55 + 0.15 * lookup_class));
        }
    }
    return texts;
}

} // namespace worlds
