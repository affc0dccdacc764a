#include "measuring.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "stopwatch.h"

namespace pyfly {

namespace {

constexpr int32_t most_runs = 8;           // of one size
constexpr int64_t us_of_size = 5'000;      // no further run when two have taken so long
constexpr int64_t us_of_all = 6'000'000;   // from then on one run is enough
constexpr int64_t us_of_rows = 20'000'000; // from then on no larger batch is measured
constexpr int32_t n_prompt = 5;            // tokens of the texts that are drafted for
constexpr size_t n_caught_up = 32;         // tokens that a drafter catches up with
constexpr int32_t draft_most = 16;         // longest draft; longer ones go on in a line
constexpr int32_t draft_of_several = 4;    // the same for several texts

class Measuring {
  public:
    explicit Measuring(Batch & batch) : batch_(batch), target_(batch.target()) {}

    MeasuredCosts run() {
        forget();
        evaluate(1, 1); // the first use of anything is slow
        if (target_.can_rewind()) {
            measure_rows();
            for (size_t d = 0; d < batch_.drafters().size(); d++) {
                if (batch_.drafters()[d].drafter->can_be_measured() && batch_.drafters()[d].draft_max > 0) {
                    measure_catch_up(d);
                    measure_drafts(d);
                }
            }
        }
        return std::move(costs_);
    }

    // Target and drafters hold nothing.
    void forget() {
        const std::vector<int32_t> other = {0};
        for (int32_t slot = 0; slot < batch_.n_slots(); slot++) {
            batch_.memory(slot).assume({}); // also what somebody else has left there
            batch_.memory(slot).clear();
            for (const BatchDrafter & d : batch_.drafters()) {
                if (d.drafter->can_be_measured()) {
                    d.drafter->prepare(slot, other);
                }
            }
        }
    }

  private:
    // Microseconds >= 1.
    int64_t time(const std::function<void()> & run) {
        int64_t us = 0;
        {
            const Stopwatch stopwatch(us);
            run();
        }
        us_so_far_ += us;
        return std::max<int64_t>(us, 1);
    }

    // The shortest of some times.
    double shortest(const std::function<int64_t()> & run) const {
        int64_t least = run(), us = least;
        const int32_t n_runs = us_so_far_ > us_of_all ? 1 : 2;
        for (int32_t i = 1; i < n_runs || (i < most_runs && us < us_of_size); i++) {
            const int64_t next = run();
            least = std::min(least, next);
            us += next;
        }
        return static_cast<double>(least);
    }

    // Made-up tokens of all kinds: how many experts a mixture of experts reads depends on them.
    std::vector<int32_t> tokens(size_t n) {
        std::vector<int32_t> out(n);
        for (int32_t & token : out) {
            random_ = random_ * 1664525u + 1013904223u;
            token = static_cast<int32_t>((random_ >> 8) % static_cast<uint32_t>(target_.n_vocab()));
        }
        return out;
    }

    // n_rows tokens of the first n_texts texts from their beginning, in one batch that the drafters see. The others
    // hold nothing.
    int64_t evaluate(int32_t n_texts, int32_t n_rows) {
        texts_.clear();
        std::vector<Span> spans;
        for (int32_t slot = 0; slot < n_texts; slot++) {
            texts_.push_back(tokens(static_cast<size_t>(n_rows / n_texts + (slot < n_rows % n_texts ? 1 : 0))));
        }
        for (int32_t slot = 0; slot < batch_.n_slots(); slot++) {
            batch_.memory(slot).clear();
        }
        for (int32_t slot = 0; slot < n_texts; slot++) {
            const std::vector<int32_t> & text = texts_[static_cast<size_t>(slot)];
            spans.push_back(batch_.memory(slot).span(text.data(), text.size(), 0));
        }
        const int64_t us = time([&] {
            target_.evaluate(spans);
            for (const BatchDrafter & d : batch_.drafters()) {
                if (target_.can_rewind()) {
                    d.drafter->observe(spans);
                }
            }
        });
        for (const Span & span : spans) {
            batch_.memory(span.sequence).evaluated(span);
        }
        return us;
    }

    // Rows that one batch can have here.
    int32_t n_rows_most() const { return std::min({target_.n_batch(), target_.n_ctx(), CostCurve::n_max}); }

    // As many as all texts may have in a step: 1, 2, 3, 4, 6, 8, 12, 16, ...
    void measure_rows() {
        int32_t deepest = 0;
        for (const BatchDrafter & d : batch_.drafters()) {
            deepest = std::max(deepest, std::min(d.draft_max, PYFLY_MAX_DEPTH));
        }
        const int32_t n_most = std::min(batch_.n_slots() * (deepest + 1), n_rows_most());
        int32_t n_last = 0;
        for (int32_t n = 1; n_last < n_most && us_so_far_ < us_of_rows; n = next_size(n)) {
            n_last = std::min(n, n_most);
            const int32_t n_texts = std::min(n_last, batch_.n_slots());
            costs_.target.push_back({n_last, shortest([&] { return evaluate(n_texts, n_last); })});
        }
    }

    static int32_t next_size(int32_t n) {
        const bool is_power = (n & (n - 1)) == 0;
        return n == 1 ? 2 : is_power ? n / 2 * 3 : n / 3 * 4;
    }

    void measure_catch_up(size_t d) {
        Drafter & drafter = *batch_.drafters()[d].drafter;
        double us = std::numeric_limits<double>::infinity();
        for (int32_t i = 0; i < 3; i++) { // the first use is slow
            const std::vector<int32_t> history = tokens(n_caught_up + 1);
            if (drafter.n_behind(0, history) == 0) {
                return;
            }
            const int64_t n_before = drafter.n_evaluated();
            const int64_t us_of_run = time([&] {
                while (drafter.prepare(0, history) > 0) {
                }
            });
            const int64_t n = std::max<int64_t>(drafter.n_evaluated() - n_before, 1);
            us = std::min(us, static_cast<double>(us_of_run) / static_cast<double>(n));
        }
        costs_.catch_up.push_back({static_cast<int32_t>(d), us});
    }

    void measure_drafts(size_t d) {
        const int32_t k_max = std::min(batch_.drafters()[d].draft_max, draft_most);
        if (n_rows_most() < n_prompt) {
            return;
        }
        evaluate(1, n_prompt - 1); // what heads read
        measure_draft(d, 1, 1);    // it catches up
        int32_t k_last = 0;
        for (int32_t k = 1; k_last < k_max; k *= 2) {
            const Drafted drafted = measure_draft(d, 1, std::min(k, k_max));
            if (drafted.k <= k_last) {
                break; // it stopped early: asked for more, it does no more
            }
            costs_.drafts.push_back({static_cast<int32_t>(d), 1, drafted.k, drafted.us});
            k_last = drafted.k;
        }
        const int32_t k = std::min(k_max, draft_of_several);
        for (int32_t n_texts = 2; n_texts / 2 < batch_.n_slots() && k_last > 0; n_texts *= 2) {
            const int32_t n = std::min(n_texts, batch_.n_slots());
            if (n * (n_prompt - 1) > n_rows_most()) {
                break;
            }
            evaluate(n, n * (n_prompt - 1));
            measure_draft(d, n, 1);
            const Drafted drafted = measure_draft(d, n, k);
            if (drafted.k == k) {
                costs_.drafts.push_back({static_cast<int32_t>(d), n, k, drafted.us});
            }
        }
    }

    struct Drafted {
        int32_t k; // steps that were taken for every text; 0: it had nothing to say
        double us;
    };

    // Drafts of k tokens behind what the target has just evaluated of the first n_texts texts.
    Drafted measure_draft(size_t d, int32_t n_texts, int32_t k) {
        Drafter & drafter = *batch_.drafters()[d].drafter;
        std::vector<std::vector<int32_t>> histories;
        for (int32_t slot = 0; slot < n_texts; slot++) {
            histories.push_back(texts_[static_cast<size_t>(slot)]);
            histories.back().push_back(0);
        }
        std::vector<Proposal> proposals;
        const int64_t n_before = drafter.n_evaluated();
        const double us = shortest([&] {
            proposals.assign(histories.size(), {});
            std::vector<DraftRequest> requests;
            for (int32_t slot = 0; slot < n_texts; slot++) {
                const size_t i = static_cast<size_t>(slot);
                requests.push_back({slot, &histories[i], k, &proposals[i]});
            }
            return time([&] { drafter.propose(requests); });
        });
        int32_t n_steps = drafter.n_evaluated() > n_before ? k : 0;
        for (const Proposal & proposal : proposals) {
            n_steps = std::min(n_steps, static_cast<int32_t>(proposal.tokens.size()) + 1); // one that was not sure
        }
        return {n_steps, us};
    }

    Batch & batch_;
    Model & target_;
    MeasuredCosts costs_;
    std::vector<std::vector<int32_t>> texts_; // that were evaluated last
    int64_t us_so_far_ = 0;
    uint32_t random_ = 1;
};

} // namespace

MeasuredCosts measure(Batch & batch) {
    batch.require_idle();
    Measuring measuring(batch);
    try {
        MeasuredCosts costs = measuring.run();
        measuring.forget();
        return costs;
    } catch (...) {
        measuring.forget();
        throw;
    }
}

} // namespace pyfly
