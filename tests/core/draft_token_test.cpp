// The token that a row of a drafter's logits proposes, and where a draft ends.

#undef NDEBUG
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdio>
#include <vector>

#include "drafters/draft_token.h"
#include "drafters/row_drafter.h"
#include "error.h"

using pyfly::draft_token;
using pyfly::DraftStep;
using pyfly::Proposal;
using pyfly::require_row;

namespace {

// Probabilities 0.1, 0.6, 0.3.
const std::vector<float> row = {std::log(0.1f), std::log(0.6f), std::log(0.3f)};

pyfly::DraftToken next(double p_min, const pyfly::DrawDraft & draw, const pyfly::DraftStop & stop, Proposal & out,
                       std::optional<double> confidence = std::nullopt) {
    return draft_token(row.data(), row.size(), require_row(row.data(), row.size(), "drafter"), p_min, draw, stop, out,
                       confidence);
}

void test_without_a_stop() {
    Proposal out;
    assert(next(0.0, {}, {}, out).token == 1 && next(0.59, {}, {}, out).token == 1);
    assert(!next(0.61, {}, {}, out).token);
    assert(out.confidence.empty() && out.dropped == -1);
}

void test_a_stop_is_asked_with_the_probability_and_before_anything_is_drawn() {
    for (const auto step : {DraftStep::ends_before, DraftStep::ends_behind, DraftStep::goes_on}) {
        Proposal out;
        double asked = 0.0;
        int n_drawn = 0;
        const auto draw = [&](const float *, size_t, std::vector<pyfly::Weights> &) {
            assert(asked > 0.0);
            return n_drawn++, 2;
        };
        const auto found = next(0.0, draw, [&](double p) { return asked = p, step; }, out);
        assert(std::abs(asked - 0.6) < 1e-6 && out.confidence.size() == 1);
        assert(n_drawn == (step == DraftStep::ends_before ? 0 : 1));
        assert(found.token.value_or(-1) == (step == DraftStep::ends_before ? -1 : 2));
        assert(out.dropped == (step == DraftStep::ends_before ? 1 : -1));
        assert(found.is_last == (step == DraftStep::ends_behind));
    }
}

void test_a_confidence_of_its_own() {
    Proposal out;
    const auto stop = [](double p) { return p < 0.5 ? DraftStep::ends_before : DraftStep::goes_on; };
    assert(!next(0.0, {}, stop, out, 0.2).token && out.dropped == 1);
    assert(next(0.0, {}, stop, out, 0.9).token == 1);
}

// A drafter whose most probable token is always 1, with a probability of 0.6.
void test_a_drafter_ends_where_it_is_stopped() {
    const auto give = [](void *, const int32_t *, size_t, float * out) {
        return std::copy(row.begin(), row.end(), out), 0;
    };
    pyfly::RowDrafter drafter(give, nullptr, 3);
    const std::vector<int32_t> history = {0};
    for (const auto end : {DraftStep::ends_before, DraftStep::ends_behind, DraftStep::goes_on}) {
        Proposal out;
        int n_asked = 0;
        drafter.propose(
            {{0, &history, 5, &out, false, {}, [&](double) { return ++n_asked < 3 ? DraftStep::goes_on : end; }}});
        assert(out.tokens.size() == (end == DraftStep::ends_before ? 2u : end == DraftStep::ends_behind ? 3u : 5u));
        assert(out.confidence.size() == static_cast<size_t>(n_asked));
        assert(out.dropped == (end == DraftStep::ends_before ? 1 : -1));
    }
}

void test_a_row_without_a_distribution() {
    const std::vector<float> bad = {std::nanf(""), 1.0f};
    try {
        require_row(bad.data(), bad.size(), "draft model");
        assert(false);
    } catch (const pyfly::Error & error) {
        assert(error.status() == PYFLY_STATUS_NOT_FINITE);
    }
}

} // namespace

int main() {
    test_without_a_stop();
    test_a_stop_is_asked_with_the_probability_and_before_anything_is_drawn();
    test_a_confidence_of_its_own();
    test_a_drafter_ends_where_it_is_stopped();
    test_a_row_without_a_distribution();
    std::printf("draft token: ok\n");
    return 0;
}
