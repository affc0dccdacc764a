#include "measuring.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "bounded_loop.h"
#include "stop.h"

namespace pyfly {

namespace {

constexpr int32_t most_passes = 8;
constexpr int64_t us_of_passes = 150'000; // no third pass when two have taken so long
constexpr int64_t us_of_all = 6'000'000;  // from then on one pass is enough
constexpr int64_t us_of_first_pass = 20'000'000;
constexpr int32_t most_doubts = 4; // further runs of a size that seems to cost more than a larger one
constexpr int32_t n_to_record = 2; // batches of one size, before the backend of a GPU has recorded it (CUDA's graphs)
constexpr int32_t n_prompt = 5;    // tokens of the requests that are drafted for
constexpr size_t n_caught_up = 32; // tokens that a drafter catches up with
constexpr int32_t draft_most = 16; // longest draft; longer ones go on in a line
constexpr int32_t draft_of_several = 4; // the same for several requests

class Measuring {
  public:
    Measuring(Batch & batch, const std::function<int64_t()> & clock)
        : batch_(batch), target_(batch.target()), clock_(clock) {}

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
                    d.drafter->prepare(slot, other, SIZE_MAX);
                }
            }
        }
    }

  private:
    // Microseconds >= 1.
    int64_t time(const std::function<void()> & run) {
        require_wanted();
        const int64_t begin = clock_();
        run();
        const int64_t us = clock_() - begin;
        us_so_far_ += us;
        return std::max<int64_t>(us, 1);
    }

    // The shortest of several times of each size; sizes rise. What else the machine does only ever adds to a time, and
    // lasts: all sizes take turns. Where the first turns take too long, the largest sizes are left out.
    std::vector<int64_t> shortest(const std::vector<std::function<int64_t()>> & sizes) {
        std::vector<int64_t> least;
        const int64_t us_before = us_so_far_;
        const auto us = [&] { return us_so_far_ - us_before; };
        for (size_t i = 0; i < sizes.size() && (i == 0 || us() < us_of_first_pass); i++) {
            least.push_back(sizes[i]());
        }
        const auto repeat = [&](size_t i) { least[i] = std::min(least[i], sizes[i]()); };
        for (int32_t pass = 1; pass < most_passes && us_so_far_ < us_of_all && (pass < 2 || us() < us_of_passes);
             pass++) {
            for (size_t i = 0; i < least.size(); i++) {
                repeat(i);
            }
        }
        for (int32_t doubt = 0; doubt < most_doubts && us_so_far_ < us_of_all; doubt++) {
            for (size_t i = 0; i + 1 < least.size(); i++) {
                if (least[i] > *std::min_element(least.begin() + static_cast<std::ptrdiff_t>(i) + 1, least.end())) {
                    repeat(i);
                }
            }
        }
        return least;
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

    // n_rows tokens of the first n_requests requests from their beginning, in one batch that the drafters see. The
    // others hold nothing.
    int64_t evaluate(int32_t n_requests, int32_t n_rows) {
        texts_.clear();
        std::vector<Span> spans;
        for (int32_t slot = 0; slot < n_requests; slot++) {
            texts_.push_back(tokens(static_cast<size_t>(n_rows / n_requests + (slot < n_rows % n_requests ? 1 : 0))));
        }
        for (int32_t slot = 0; slot < batch_.n_slots(); slot++) {
            batch_.memory(slot).clear();
        }
        for (int32_t slot = 0; slot < n_requests; slot++) {
            const std::vector<int32_t> & text = texts_[static_cast<size_t>(slot)];
            spans.push_back(batch_.memory(slot).span(text.data(), text.size(), 0));
        }
        const int64_t us = time([&] {
            target_.evaluate(spans);
            for (const BatchDrafter & d : batch_.drafters()) {
                if (target_.can_rewind()) {
                    d.drafter->observe(target_, spans, std::vector<bool>(spans.size(), true));
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

    // Batches of 1, 2, 3, 4, 6, ... rows, up to as many as all requests may have in an iteration.
    void measure_rows() {
        int32_t deepest = 0;
        for (const BatchDrafter & d : batch_.drafters()) {
            deepest = std::max(deepest, std::min(d.draft_max, PYFLY_MAX_DEPTH));
        }
        const int32_t n_most = std::min(batch_.n_slots() * (deepest + 1), n_rows_most());
        std::vector<int32_t> sizes;
        std::vector<std::function<int64_t()>> runs;
        std::vector<int64_t> first; // of each size, the shortest time behind batches of another size
        for (int32_t n = 1, n_last = 0; n_last < n_most; n = next_size(n)) {
            n_last = std::min(n, n_most);
            const size_t i = sizes.size();
            sizes.push_back(n_last);
            first.push_back(std::numeric_limits<int64_t>::max());
            runs.emplace_back([this, n_last, i, &first] {
                const int32_t n_requests = std::min(n_last, batch_.n_slots());
                int64_t us = evaluate(n_requests, n_last);
                if (target_.is_faster_in_a_row()) {
                    first[i] = std::min(first[i], us);
                    for (int32_t again = 0; again < n_to_record; again++) {
                        us = evaluate(n_requests, n_last);
                    }
                }
                return us;
            });
        }
        const std::vector<int64_t> least = shortest(runs);
        std::vector<double> change;
        for (size_t i = 0; i < least.size(); i++) {
            costs_.target.push_back({sizes[i], static_cast<double>(least[i])});
            change.push_back(static_cast<double>(first[i] - least[i]));
        }
        if (target_.is_faster_in_a_row() && change.size() > 1) {
            const auto median = change.begin() + static_cast<std::ptrdiff_t>(change.size() / 2);
            std::nth_element(change.begin(), median, change.end());
            costs_.change_us = std::max(*median, 0.0);
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
            const int64_t us_of_run =
                time([&] { until_none_is_left([&] { return drafter.prepare(0, history, SIZE_MAX); }); });
            const int64_t n = std::max<int64_t>(drafter.n_evaluated() - n_before, 1);
            us = std::min(us, static_cast<double>(us_of_run) / static_cast<double>(n));
        }
        costs_.catch_up.push_back({static_cast<int32_t>(d), us});
    }

    void measure_drafts(size_t d) {
        const int32_t n_of_each = n_prompt - 1; // the last token is the drafter's
        const int32_t n_most = std::min(batch_.n_slots(), n_rows_most() / n_of_each);
        if (n_most < 1) {
            return;
        }
        evaluate(n_most, n_most * n_of_each); // heads read what the target evaluates
        const int32_t k_max =
            std::min({batch_.drafters()[d].draft_max, batch_.drafters()[d].drafter->draft_most(), draft_most});
        std::vector<int32_t> ks;
        const int32_t k_reached = n_steps(d, 1, k_max);
        for (int32_t k = 1, k_last = 0; k_last < k_reached; k *= 2) {
            k_last = std::min(k, k_reached);
            ks.push_back(k_last);
        }
        measure_drafts(d, {1}, ks);
        std::vector<int32_t> several;
        const int32_t k = std::min(k_max, draft_of_several);
        for (int32_t n_requests = 2, n_last = 1; n_last < n_most; n_requests *= 2) {
            n_last = std::min(n_requests, n_most);
            if (n_steps(d, n_last, k) == k) {
                several.push_back(n_last);
            }
        }
        measure_drafts(d, several, {k});
    }

    void measure_drafts(size_t d, const std::vector<int32_t> & n_requests, const std::vector<int32_t> & ks) {
        std::vector<MeasuredCosts::Draft> sizes;
        std::vector<std::function<int64_t()>> runs;
        for (const int32_t n : n_requests) {
            for (const int32_t k : ks) {
                sizes.push_back({static_cast<int32_t>(d), n, k, 0.0});
                runs.emplace_back([this, d, n, k] { return draft(d, n, k); });
            }
        }
        const std::vector<int64_t> least = shortest(runs);
        for (size_t i = 0; i < least.size(); i++) {
            sizes[i].us = static_cast<double>(least[i]);
            costs_.drafts.push_back(sizes[i]);
        }
    }

    // Of k steps, how many the drafter takes for every one of these requests: one that is not sure of its drafts stops
    // early. It has caught up with them then.
    int32_t n_steps(size_t d, int32_t n_requests, int32_t k) {
        const int64_t n_before = batch_.drafters()[d].drafter->n_evaluated();
        draft(d, n_requests, k);
        int32_t n = batch_.drafters()[d].drafter->n_evaluated() > n_before ? k : 0;
        for (const Proposal & proposal : proposals_) {
            n = std::min(n, static_cast<int32_t>(proposal.tokens.size()) + 1);
        }
        return n;
    }

    // Drafts k tokens behind what the target has just evaluated of the first n_requests requests.
    int64_t draft(size_t d, int32_t n_requests, int32_t k) {
        std::vector<std::vector<int32_t>> histories;
        std::vector<DraftRequest> requests;
        proposals_.assign(static_cast<size_t>(n_requests), {});
        const std::vector<int32_t> usual = batch_.drafters()[d].drafter->usual_text();
        for (size_t i = 0; i < proposals_.size(); i++) {
            histories.push_back(usual.empty() ? texts_[i] : usual);
            if (usual.empty()) {
                histories.back().push_back(0);
            }
        }
        for (size_t i = 0; i < proposals_.size(); i++) {
            // As they are asked while decoding: a draft that is stopped needs nothing behind its last token.
            const auto stop = [k, n = 0](double) mutable {
                return ++n < k ? DraftStep::goes_on : DraftStep::ends_behind;
            };
            requests.push_back({static_cast<int32_t>(i), &histories[i], k, &proposals_[i], false, {}, stop});
        }
        return time([&] { batch_.drafters()[d].drafter->propose(requests); });
    }

    Batch & batch_;
    Model & target_;
    const std::function<int64_t()> & clock_;
    MeasuredCosts costs_;
    std::vector<std::vector<int32_t>> texts_; // that were evaluated last
    std::vector<Proposal> proposals_;         // that were made last
    int64_t us_so_far_ = 0;
    uint32_t random_ = 1;
};

} // namespace

MeasuredCosts measure(Batch & batch, const std::function<int64_t()> & clock) {
    batch.require_idle();
    Measuring measuring(batch, clock);
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
