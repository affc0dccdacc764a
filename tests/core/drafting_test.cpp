// What one drafter does wrong stays with it and its request.

#undef NDEBUG
#include <algorithm>
#include <cassert>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "batch.h"
#include "bounded_loop.h"
#include "error.h"
#include "sampler.h"
#include "scripted_model.h"
#include "stop.h"

namespace {

constexpr int32_t n_vocab = 8, target_choice = 1;

int32_t nearly_flat_row(void *, const int32_t *, size_t, float * out) {
    std::fill(out, out + n_vocab, 0.0f);
    out[target_choice] = 0.01f;
    return 0;
}

// It says that it has rows, and leaves some without tokens.
class LeavesRows : public pyfly::Drafter {
  public:
    int32_t n_slots() const override { return 2; }
    bool has_rows() const override { return true; }
    void propose(const std::vector<pyfly::DraftRequest> & requests) override {
        for (const pyfly::DraftRequest & request : requests) {
            request.out->rows.assign(static_cast<size_t>(request.n_max * n_vocab), 0.0f);
        }
    }
};

class Proposes : public pyfly::Drafter {
  public:
    int32_t n_slots() const override { return 2; }
    void propose(const std::vector<pyfly::DraftRequest> & requests) override {
        for (const pyfly::DraftRequest & request : requests) {
            request.out->tokens = {6};
        }
    }
};

// It fails for the second request: where it is asked how much it has to do, or for a draft.
class Fails : public pyfly::Drafter {
  public:
    int32_t n_slots() const override { return 2; }
    size_t n_behind(int32_t slot, const std::vector<int32_t> &) const override {
        if (slot == 1 && fails_behind) {
            throw std::runtime_error("no tokenizer");
        }
        return 0;
    }
    void propose(const std::vector<pyfly::DraftRequest> & requests) override {
        for (const pyfly::DraftRequest & request : requests) {
            if (request.slot == 1 && fails_proposing) {
                throw pyfly::Error(PYFLY_STATUS_CONTEXT_FULL, "the draft's cache is full");
            }
            request.out->tokens = {target_choice};
        }
    }

    bool fails_behind = false, fails_proposing = false;
};

struct Requests {
    Requests(bool is_adaptive, std::vector<pyfly::BatchDrafter> drafters) : batch(model, vocabulary) {
        batch.configure(is_adaptive, std::move(drafters), 0, 0);
    }

    void begin(int32_t slot, pyfly::GateExpression gate) {
        const pyfly_request_settings settings = {{0, PYFLY_WINDOW_AGREE, -1, 0}, 0, 0, 0, 0, 0, 0};
        batch.begin(slot, {settings, std::move(gate), batch.draft_max(nullptr)}, {2, 3}, std::nullopt,
                    pyfly::make_sampler(nullptr, false, false));
    }

    const std::vector<int32_t> & history(int32_t slot) const { return batch.at(slot).transcript().history(); }

    pyfly::ScriptedModel model{{n_vocab, 64, 64, 2, 128, -1, 1, nullptr}, nearly_flat_row, nullptr};
    pyfly::Vocabulary vocabulary{n_vocab};
    pyfly::Batch batch;
};

void test_rows_without_tokens_are_not_the_next_drafters() {
    const pyfly_gate_node fuzzy = {PYFLY_GATE_FUZZY_TV, 0, 0.3, 0.0};
    LeavesRows leaves;
    Proposes proposes;
    Requests requests(false, {{&leaves, 2}, {&proposes, 2}});
    requests.begin(0, {&fuzzy, 1});
    requests.batch.step();
    assert(requests.history(0).at(2) == target_choice); // token 6 has no row to be compared by
    assert(requests.batch.at(0).stats().drafted == 1);
}

void test_a_request_stops_alone(bool is_adaptive, bool Fails::*failure, int32_t n_steps_before, pyfly_status status) {
    Fails drafter;
    Requests requests(is_adaptive, {{&drafter, 2}});
    for (const int32_t slot : {0, 1}) {
        requests.begin(slot, pyfly::GateExpression::exact());
    }
    for (int32_t i = 0; i < n_steps_before; i++) {
        requests.batch.step();
    }
    drafter.*failure = true;
    const std::vector<pyfly::Batch::Progress> progress = requests.batch.step();
    assert(progress.size() == 2 && progress[0].is_step && progress[0].failure.status == PYFLY_OK);
    assert(progress[1].failure.status == status && requests.batch.at(1).stats().steps == n_steps_before);
    requests.batch.end(1, requests.history(1).size() - 1);
    assert(requests.batch.step().size() == 1);
}

// With a confidence for each token, as draft models have it.
class Weighs : public Proposes {
  public:
    void propose(const std::vector<pyfly::DraftRequest> & requests) override {
        Proposes::propose(requests);
        for (const pyfly::DraftRequest & request : requests) {
            request.out->confidence = {0.5f};
        }
    }
};

// What is known of the last draft of a request says nothing of a step without one: not when the drafters are gone.
void test_without_drafters_nothing_is_learned_of_the_last_draft() {
    Weighs drafter;
    Requests requests(false, {{&drafter, 2}});
    requests.begin(0, pyfly::GateExpression::exact());
    requests.batch.step();
    requests.batch.end(0, pyfly::Sequence::everything);
    requests.batch.configure(true, {}, 0, 0);
    requests.begin(0, pyfly::GateExpression::exact());
    const std::vector<pyfly::Batch::Progress> progress = requests.batch.step();
    assert(progress.size() == 1 && progress[0].is_step && progress[0].failure.status == PYFLY_OK);
}

int32_t n_asked = 0;

pyfly::Error error_of_endless_loop() {
    try {
        pyfly::until_none_is_left([] { return size_t(1); });
    } catch (const pyfly::Error & e) {
        return e;
    }
    return {PYFLY_OK, ""};
}

void test_loops_end_and_the_caller_may_want_no_more() {
    pyfly::set_stop([]() -> int32_t { return ++n_asked > 0 ? -7 : 0; });
    const pyfly::Error refused = error_of_endless_loop();
    assert(n_asked == 1 && refused.status() == PYFLY_STATUS_CALLBACK);
    assert(std::string(refused.what()).find("(7)") != std::string::npos);
    pyfly::set_stop(nullptr);
    assert(error_of_endless_loop().status() == PYFLY_STATUS_INTERNAL);
    int32_t n = 0;
    pyfly::until_none_is_left([&n] { return static_cast<size_t>(3 - ++n); });
    assert(n == 3);
}

} // namespace

int main() {
    test_without_drafters_nothing_is_learned_of_the_last_draft();
    test_loops_end_and_the_caller_may_want_no_more();
    test_rows_without_tokens_are_not_the_next_drafters();
    for (const bool is_adaptive : {false, true}) {
        test_a_request_stops_alone(is_adaptive, &Fails::fails_behind, 0, PYFLY_STATUS_INTERNAL);
    }
    test_a_request_stops_alone(true, &Fails::fails_behind, 2, PYFLY_STATUS_INTERNAL);
    test_a_request_stops_alone(false, &Fails::fails_proposing, 2, PYFLY_STATUS_NATIVE);
    std::printf("drafting: ok\n");
    return 0;
}
