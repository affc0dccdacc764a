// Which batches costs are measured with.

#undef NDEBUG
#include <algorithm>
#include <cassert>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "batch.h"
#include "measuring.h"
#include "scripted_model.h"

namespace {

int32_t flat_row(void *, const int32_t *, size_t, float * out) {
    std::fill(out, out + 8, 0.0f);
    return 0;
}

class Watched : public pyfly::ScriptedModel {
  public:
    explicit Watched(bool records)
        : ScriptedModel({8, 64, 64, 3, 192, -1, 1, nullptr}, flat_row, nullptr), records_(records) {}

    bool is_faster_in_a_row() const override { return records_; }

    void evaluate(const std::vector<pyfly::Span> & spans) override {
        size_t n = 0;
        for (const pyfly::Span & span : spans) {
            n += span.n;
        }
        const bool is_change = sizes.empty() || n != sizes.back();
        now_us += 100 * static_cast<int64_t>(n) + (records_ && is_change ? 2000 : 0);
        sizes.push_back(n);
        ScriptedModel::evaluate(spans);
    }

    std::vector<size_t> sizes; // of all batches
    int64_t now_us = 0;        // a clock that only batches move

  private:
    bool records_;
};

// Made-up tokens are no text that a model of another vocabulary drafts for as it does for others.
class OfUsualTexts : public pyfly::Drafter {
  public:
    int32_t n_slots() const override { return 3; }
    std::vector<int32_t> usual_text() const override { return {5, 6, 7}; }
    void propose(const std::vector<pyfly::DraftRequest> & requests) override {
        for (const pyfly::DraftRequest & request : requests) {
            assert(*request.history == usual_text());
            for (int32_t n = 1; n <= request.n_max; n++) {
                assert(request.stop(0.1) ==
                       (n < request.n_max ? pyfly::DraftStep::goes_on : pyfly::DraftStep::ends_behind));
            }
            request.out->tokens.assign(static_cast<size_t>(request.n_max), 1);
            n_drafted += request.n_max;
        }
    }
    int64_t n_evaluated() const override { return n_drafted; }

    int64_t n_drafted = 0;
};

void test_drafts_are_measured_behind_the_usual_text_and_stopped_at_their_end() {
    Watched model(false);
    const pyfly::Vocabulary vocabulary(8);
    OfUsualTexts drafter;
    pyfly::Batch batch(model, vocabulary);
    batch.configure(true, {{&drafter, 2}}, 0, 0);
    const pyfly::MeasuredCosts costs = pyfly::measure(batch);
    assert(drafter.n_drafted > 0 && costs.drafts.size() >= 2);
}

// Before the first batch of two rows: one row warms up, and one is measured. Where batches in a row are faster, two
// more of each size go before the one that is measured, and what the first takes in addition is known.
void test_batches_are_measured_in_a_row(bool records) {
    Watched model(records);
    const pyfly::Vocabulary vocabulary(8);
    pyfly::Batch batch(model, vocabulary);
    const pyfly::MeasuredCosts costs = pyfly::measure(batch, [&model] { return model.now_us; });
    assert(costs.target.size() == 3);
    for (size_t i = 0; i < 3; i++) { // 1, 2 and 3 rows
        assert(costs.target[i].n == static_cast<int32_t>(i) + 1 && costs.target[i].us == 100.0 * (i + 1.0));
    }
    const auto next = [&](auto from, bool is_single) {
        return std::find_if(from, model.sizes.end(), [&](size_t n) { return (n == 1) == is_single; });
    };
    const auto end = next(model.sizes.begin(), false);
    assert(end - model.sizes.begin() == (records ? 4 : 2));
    const auto begin = next(end, true); // of the second pass
    assert(next(begin, false) - begin == (records ? 3 : 1));
    assert(records ? std::count(end, begin, 2) == 3 && std::count(end, begin, 3) == 3 : begin - end == 2);
    assert(costs.change_us == (records ? 2000.0 : 0.0));
}

} // namespace

int main() {
    test_drafts_are_measured_behind_the_usual_text_and_stopped_at_their_end();
    test_batches_are_measured_in_a_row(false);
    test_batches_are_measured_in_a_row(true);
    std::printf("measuring: ok\n");
    return 0;
}
