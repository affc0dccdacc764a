// Which batches costs are measured with.

#undef NDEBUG
#include <algorithm>
#include <cassert>
#include <chrono>
#include <cstdio>
#include <thread>
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
        if (records_ && !sizes.empty() && n != sizes.back()) {
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
        sizes.push_back(n);
        ScriptedModel::evaluate(spans);
    }

    std::vector<size_t> sizes; // of all batches

  private:
    bool records_;
};

// Before the first batch of two rows: one row warms up, and one is measured. Where batches in a row are faster, two
// more of each size go before the one that is measured, and what the first takes in addition is known.
void test_batches_are_measured_in_a_row(bool records) {
    Watched model(records);
    const pyfly::Vocabulary vocabulary(8);
    pyfly::Batch batch(model, vocabulary);
    const pyfly::MeasuredCosts costs = pyfly::measure(batch);
    assert(costs.target.size() == 3); // 1, 2 and 3 rows
    const auto next = [&](auto from, bool is_single) {
        return std::find_if(from, model.sizes.end(), [&](size_t n) { return (n == 1) == is_single; });
    };
    const auto end = next(model.sizes.begin(), false);
    assert(end - model.sizes.begin() == (records ? 4 : 2));
    const auto begin = next(end, true); // of the second pass
    assert(next(begin, false) - begin == (records ? 3 : 1));
    assert(records ? std::count(end, begin, 2) == 3 && std::count(end, begin, 3) == 3 : begin - end == 2);
    assert(records ? costs.change_us > 1500.0 : costs.change_us == 0.0);
    assert(!records || costs.target.back().us < 1500.0);
}

} // namespace

int main() {
    test_batches_are_measured_in_a_row(false);
    test_batches_are_measured_in_a_row(true);
    std::printf("measuring: ok\n");
    return 0;
}
