// The governor and prompt lookup on drafts of a real model: answers of Qwen2.5-Coder-1.5B, and at each of their places
// what SmolLM2-135M drafts there (tests/data/drafts_of_smollm2.txt). Costs are known, and no clock is read. Prints the
// speed relative to plain decoding, of the governor also that of each kind of prompt, and of other policies.

#undef NDEBUG
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "drafters/prompt_lookup.h"
#include "governor.h"
#include "governor_worlds.h"

namespace {

using pyfly::Candidate;
using pyfly::DraftStep;
using pyfly::Governor;
using pyfly::MeasuredCosts;
using pyfly::Policy;
using pyfly::Proposal;

constexpr int32_t longest_lookup = 10, longest_draft = 8; // as by default
constexpr int32_t n_orders = 8;

// A text: a line with its kind and the numbers of tokens, lines with the tokens of prompt and answer and with the bytes
// of the answer's tokens, and a line for each place of the answer: how many tokens the draft model was asked for, how
// many of them continue the answer, and of each its probability (per mille) and its bytes.
struct Own {
    double p;
    int32_t n_bytes;
};
struct Place {
    std::vector<Own> drafted;
    size_t n_right;
};
struct Text {
    std::string kind;
    std::vector<int32_t> prompt, answer, n_bytes;
    std::vector<Place> places;
};

std::vector<Text> read(const std::string & path) {
    std::ifstream in(path);
    std::vector<Text> texts;
    size_t n_prompt = 0, n_answer = 0;
    for (Text text; in >> text.kind >> n_prompt >> n_answer; texts.push_back(text)) {
        text.prompt.resize(n_prompt);
        text.answer.resize(n_answer);
        text.n_bytes.resize(n_answer);
        for (std::vector<int32_t> * numbers : {&text.prompt, &text.answer, &text.n_bytes}) {
            for (int32_t & number : *numbers) {
                in >> number;
            }
        }
        text.places.assign(n_answer, {});
        for (Place & place : text.places) {
            size_t n = 0;
            in >> n >> place.n_right;
            place.drafted.resize(n);
            for (Own & own : place.drafted) {
                in >> own.p >> own.n_bytes;
                own.p /= 1000.0;
            }
        }
        assert(in);
    }
    return texts;
}

// Microseconds of batches of 1, 2, ... rows, further ones in a line; of a token that the draft model drafts or reads.
struct Machine {
    std::string name;
    std::vector<double> rows;
    double draft, catch_up;

    double target(int32_t n) const {
        const int32_t n_measured = static_cast<int32_t>(rows.size());
        const double slope = (rows.back() - rows.front()) / (n_measured - 1);
        return n <= n_measured ? rows[static_cast<size_t>(n) - 1] : rows.back() + slope * (n - n_measured);
    }
};

Governor informed(Governor governor, const Machine & machine, int32_t lookup, int32_t model) {
    MeasuredCosts costs;
    for (const int32_t n : {1, 2, 3, 4, 6, 8, 11}) {
        costs.target.push_back({n, machine.target(n)});
    }
    if (lookup >= 0) {
        governor.expect(lookup, true, 0.0);
    }
    if (model >= 0) {
        governor.expect(model, false, 0.1);
        for (const int32_t k : {1, 2, 4, 8}) {
            costs.drafts.push_back({model, 1, k, machine.draft * k});
        }
        costs.catch_up.push_back({model, machine.catch_up});
    }
    governor.expect_costs(costs);
    return governor;
}

// A draft of the model is begun wherever the governor does not choose lookup, and ends where the governor ends it.
class EveryStep : public Governor {
  public:
    EveryStep(Governor governor, int32_t model) : Governor(std::move(governor)), model_(model) {}
    std::vector<pyfly::Choice> choose(const std::vector<Candidate> & candidates) override {
        std::vector<pyfly::Choice> choices = Governor::choose(candidates);
        for (const pyfly::Offer & offer : candidates[0].offers) {
            if (offer.drafter == model_ && (choices[0].k == 0 || choices[0].drafter == model_)) {
                choices[0] = {model_, offer.k_max};
            }
        }
        return choices;
    }

  private:
    int32_t model_;
};

enum class Who { governor, every_step, moving_average, threshold };

std::unique_ptr<Policy> make(Who who, const Machine & machine, int32_t lookup, int32_t model) {
    Governor governor = informed(Governor(), machine, lookup, model);
    switch (who) {
        case Who::governor:
            return std::make_unique<Governor>(std::move(governor));
        case Who::every_step:
            return std::make_unique<EveryStep>(std::move(governor), model);
        case Who::moving_average:
            return std::make_unique<worlds::MovingAverage>(longest_draft);
        default:
            return std::make_unique<worlds::Threshold>(longest_draft);
    }
}

struct Total {
    double us = 0.0;
    int64_t n_tokens = 0;
};
using Totals = std::map<std::string, Total>;

// Decodes texts, one after the other.
class Replay {
  public:
    Replay(const Machine & machine, Who who, bool with_lookup, bool with_model, uint32_t seed)
        : machine_(machine), lookup_(with_lookup ? 0 : -1), model_(with_model ? (with_lookup ? 1 : 0) : -1),
          policy_(make(who, machine, lookup_, model_)),
          prompt_lookup_({4, 1, longest_lookup, PYFLY_LOOKUP_LATEST, 1 << 18}, nullptr, {}, {}), rng_(seed) {}

    Total decode(const Text & text) {
        total_ = {};
        policy_->begin_request(0);
        n_behind_ = static_cast<int64_t>(text.prompt.size());
        if (model_ >= 0 && policy_->pays_to_follow(0, model_, longest_draft, 1, n_behind_)) {
            catch_up();
        }
        std::vector<int32_t> history = text.prompt;
        history.push_back(text.answer.front()); // comes with the prompt
        size_t followed = 0;                    // up to where a proposal that was not verified was compared
        while (history.size() < text.prompt.size() + text.answer.size()) {
            const size_t at = history.size() - text.prompt.size();
            const int32_t n_accepted = step(text, at, history, followed);
            history.insert(history.end(), text.answer.begin() + static_cast<std::ptrdiff_t>(at),
                           text.answer.begin() + static_cast<std::ptrdiff_t>(at) + n_accepted + 1);
            total_.n_tokens += n_accepted + 1;
        }
        prompt_lookup_.ended(history, text.prompt.size(), 0);
        return total_;
    }

  private:
    // Drafts accepted at place `at` of the answer.
    int32_t step(const Text & text, size_t at, const std::vector<int32_t> & history, size_t & followed) {
        const int32_t room = static_cast<int32_t>(text.answer.size() - at) - 1;
        Candidate candidate = {0, {}};
        Proposal found;
        if (lookup_ >= 0 && room > 0) {
            prompt_lookup_.propose({{0, &history, std::min(room, longest_lookup), &found, false, {}, {}}});
        }
        const int32_t n_found = static_cast<int32_t>(found.tokens.size());
        const auto differs = std::mismatch(found.tokens.begin(), found.tokens.end(),
                                           text.answer.begin() + static_cast<std::ptrdiff_t>(at));
        const int32_t n_right = static_cast<int32_t>(differs.first - found.tokens.begin());
        if (n_found > 0) {
            candidate.offers.push_back({lookup_, n_found, found.proposal_class, 0});
        }
        if (model_ >= 0 && room > 0) {
            candidate.offers.push_back({model_, std::min(room, longest_draft), 0, n_behind_ > 1 ? n_behind_ : 0});
        }
        const pyfly::Choice choice = policy_->choose({candidate})[0];
        const bool is_lookup = choice.k > 0 && choice.drafter == lookup_;
        int32_t n_accepted = 0;
        if (is_lookup) {
            n_accepted = std::min(n_right, choice.k);
            evaluate(choice.k);
            policy_->observe_acceptance(0, lookup_, found.proposal_class, choice.k, n_accepted);
        } else if (choice.k > 0) {
            n_accepted = draft(text, at, choice.k);
        } else {
            evaluate(0);
        }
        if (n_found > 0 && !is_lookup && at >= followed) {
            policy_->observe_acceptance(0, lookup_, found.proposal_class, n_found, n_right);
            followed = at + static_cast<size_t>(n_right) + 1;
        }
        n_behind_ = choice.k > 0 && !is_lookup ? 0 : n_behind_ + n_accepted + 1;
        return n_accepted;
    }

    // The draft model drafts at most k tokens, which are verified. Its own tokens are the target's as soon as they have
    // all bytes of one; behind its first wrong one, each counts as one.
    int32_t draft(const Text & text, size_t at, int32_t k) {
        if (n_behind_ > 1) {
            catch_up();
        }
        const Place & place = text.places[at];
        const auto stop = policy_->stop(model_, k);
        std::vector<float> confidence;
        int32_t n_drafted = 0, n_right = 0, n_bytes = 0, n_bytes_wanted = text.n_bytes[at];
        double p = 1.0;
        size_t i = 0;
        DraftStep last = DraftStep::goes_on;
        for (; i < place.drafted.size() && n_drafted < k && last == DraftStep::goes_on; i++) {
            last = stop ? stop(place.drafted[i].p) : DraftStep::goes_on;
            if (last == DraftStep::ends_before) {
                confidence.push_back(static_cast<float>(place.drafted[i].p));
                break;
            }
            p *= place.drafted[i].p;
            n_bytes += place.drafted[i].n_bytes;
            const bool is_right = i < place.n_right;
            while (n_drafted < k && (is_right ? n_bytes >= n_bytes_wanted : p > 0.0)) {
                confidence.push_back(static_cast<float>(p));
                p = is_right ? 1.0 : 0.0;
                n_drafted++;
                n_right += is_right ? 1 : 0;
                const size_t next = at + static_cast<size_t>(n_right);
                n_bytes_wanted += next < text.n_bytes.size() ? text.n_bytes[next] : INT16_MAX;
            }
            p = p == 0.0 ? 1.0 : p;
        }
        const bool is_dropped = last == DraftStep::ends_before;
        const bool dropped_right = is_dropped && n_right == n_drafted && i < place.n_right;
        const double us = machine_.draft * static_cast<double>(i + (is_dropped ? 1 : 0));
        total_.us += us;
        policy_->observe_draft(model_, {std::max(static_cast<int32_t>(confidence.size()), 1)}, noisy(us));
        evaluate(n_drafted);
        if (!stop || confidence.empty()) {
            policy_->observe_acceptance(0, model_, 0, k, n_right);
        } else {
            policy_->observe_confidence(0, model_, confidence, k, n_drafted,
                                        static_cast<size_t>(n_right + (dropped_right ? 1 : 0)),
                                        !dropped_right && (n_right < n_drafted || is_dropped));
        }
        return n_right;
    }

    void evaluate(int32_t n_drafted) {
        const double us = machine_.target(1 + n_drafted);
        total_.us += us;
        policy_->observe_target(1 + n_drafted, noisy(us));
    }

    void catch_up() {
        const double us = machine_.catch_up * static_cast<double>(n_behind_);
        total_.us += us;
        policy_->observe_catch_up(model_, n_behind_, noisy(us));
        n_behind_ = 0;
    }

    // As a clock shows it: 4% of noise, and now and then something else happens.
    double noisy(double us) {
        const bool is_disturbed = rng_() % 200 == 0;
        return us * std::exp(0.04 * normal_(rng_)) * (is_disturbed ? 4.0 : 1.0);
    }

    const Machine & machine_;
    int32_t lookup_, model_; // their places among the drafters; -1: not there
    std::unique_ptr<Policy> policy_;
    pyfly::PromptLookup prompt_lookup_;
    std::mt19937 rng_;
    std::normal_distribution<double> normal_;
    int64_t n_behind_ = 0; // tokens that the draft model has not read
    Total total_;
};

// Speeds relative to plain decoding by kind of prompt, of all orders of the texts together.
std::map<std::string, double> speeds(const Machine & machine, const std::vector<Text> & texts, Who who,
                                     bool with_lookup, bool with_model) {
    Totals totals;
    for (uint32_t seed = 0; seed < n_orders; seed++) {
        std::vector<Text> order = texts;
        std::mt19937 rng(seed);
        std::shuffle(order.begin(), order.end(), rng);
        Replay replay(machine, who, with_lookup, with_model, seed);
        for (const Text & text : order) {
            const Total of_text = replay.decode(text);
            totals[text.kind].us += of_text.us;
            totals[text.kind].n_tokens += of_text.n_tokens;
        }
    }
    std::map<std::string, double> out;
    for (const auto & [kind, total] : totals) {
        out[kind] = static_cast<double>(total.n_tokens) * machine.target(1) / total.us;
    }
    return out;
}

double mean(const std::map<std::string, double> & of_kinds) {
    double sum = 0.0;
    for (const auto & [kind, speed] : of_kinds) {
        sum += std::log(speed);
    }
    return std::exp(sum / static_cast<double>(of_kinds.size()));
}

} // namespace

int main() {
    const std::vector<Text> texts = read(PYFLY_TEST_DATA "/drafts_of_smollm2.txt");
    assert(texts.size() == 28);
    // Qwen2.5-Coder-1.5B Q4_K_M on two cores, and what larger and smaller models would cost.
    const std::vector<double> zen4 = {30.3, 30.6, 31.5, 32.4, 34.5, 36.5, 41.5, 46.5, 52, 57, 62.1};
    // In a moment in which its memory is faster, and its cores are slower.
    const std::vector<double> zen4_fast = {23.7, 25.2, 28.4, 31.7, 37.2, 42.8, 50.4, 58, 63.5, 69, 74.6};
    const std::vector<double> avx2 = {71, 78, 92, 97, 110, 122, 135, 148, 160, 172, 184};
    const std::vector<double> zen4_avx2 = {30.9, 31.3, 36, 43.6, 54, 64.2, 74, 83, 93, 103, 113}; // without AVX-512
    const auto scaled = [](std::vector<double> rows, double by) {
        std::transform(rows.begin(), rows.end(), rows.begin(), [&](double us) { return by * us; });
        return rows;
    };
    const std::vector<Machine> machines = {
        {"Zen 4", scaled(zen4, 1000.0), 4500.0, 650.0},
        {"Zen 4, faster memory", scaled(zen4_fast, 1000.0), 5500.0, 650.0},
        {"AVX2", scaled(avx2, 1000.0), 5500.0, 1000.0},
        {"Zen 4, 5 x as large", scaled(zen4, 5000.0), 4500.0, 650.0},
        {"Zen 4, half as large", scaled(zen4, 500.0), 4500.0, 650.0},
        {"Zen 4, a quarter", scaled(zen4, 250.0), 4500.0, 650.0},
        {"Zen 4 with the kernels for AVX2", scaled(zen4_avx2, 1000.0), 4400.0, 1700.0},
    };
    struct Row {
        const char * name;
        Who who;
        bool with_lookup, with_model;
        double least;                   // of any kind on any machine
        std::vector<double> means = {}; // of each machine, and of all
    };
    std::vector<Row> rows = {
        {"lookup", Who::governor, true, false, 0.98},
        {"SmolLM2", Who::governor, false, true, 0.97},
        {"both", Who::governor, true, true, 0.98},
        {"SmolLM2, every step", Who::every_step, false, true, 0.0},
        {"both, every step", Who::every_step, true, true, 0.0},
        {"SmolLM2, moving average", Who::moving_average, false, true, 0.0},
        {"both, moving average", Who::moving_average, true, true, 0.0},
        {"SmolLM2, threshold", Who::threshold, false, true, 0.0},
        {"both, threshold", Who::threshold, true, true, 0.0},
    };
    for (const Machine & machine : machines) {
        std::printf("%s\n", machine.name.c_str());
        for (Row & row : rows) {
            const auto of_kinds = speeds(machine, texts, row.who, row.with_lookup, row.with_model);
            row.means.push_back(mean(of_kinds));
            std::printf("  %-23s %.3f ", row.name, row.means.back());
            for (const auto & [kind, speed] : of_kinds) {
                std::printf(" %s %.2f", kind.c_str(), speed);
                assert(speed > row.least);
            }
            std::printf("\n");
        }
        const auto latest = [&](size_t row) { return rows[row].means.back(); };
        assert(latest(2) > 0.98 * std::max(latest(0), latest(1)));
        for (size_t row = 3; row < rows.size(); row++) {
            assert(latest(rows[row].with_lookup ? 2 : 1) > 0.97 * latest(row));
        }
    }
    for (Row & row : rows) {
        std::printf("%-23s", row.name);
        double sum = 0.0;
        for (const double of_machine : row.means) {
            std::printf(" %.3f", of_machine);
            sum += std::log(of_machine) / static_cast<double>(row.means.size());
        }
        row.means.push_back(std::exp(sum));
        std::printf(" mean %.3f\n", row.means.back());
    }
    assert(rows[0].means.back() > 1.39 && rows[1].means.back() > 1.46 && rows[2].means.back() > 1.59);
    assert(rows[1].means[4] > 1.28 && rows[1].means[5] > 0.99 && rows[2].means[5] > 1.44); // half as large, a quarter
    std::printf("ok\n");
}
