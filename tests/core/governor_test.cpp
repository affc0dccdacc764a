// The governor in simulated worlds, where costs and acceptance are known. No clock is read.

#undef NDEBUG
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <vector>

#include "governor.h"

namespace {

using pyfly::CostCurve;
using pyfly::Governor;

// A world: what a batch of n rows and a drafted token cost, and how likely a draft is right.
struct World {
    std::function<double(int32_t)> target_us;
    double draft_us;
    double acceptance;
    bool is_free;
    double noise = 0.05;
    double expected_cost = 0.0;
    double draft_start_us = 0.0; // of a draft, besides its tokens
};

constexpr int32_t k_max = 10;

struct Simulation {
    explicit Simulation(uint32_t seed) : rng(seed) {}

    // Runs rounds until n tokens are out; returns tokens per second. k < 0: the governor chooses.
    double run(const World & world, int64_t n, int32_t k = -1) {
        std::uniform_real_distribution<double> uniform(0.0, 1.0);
        std::normal_distribution<double> normal(1.0, world.noise);
        double us = 0.0;
        int64_t tokens = 0;
        last_k.clear();
        governor.expect(0, world.is_free, world.expected_cost);
        governor.begin_text();
        while (tokens < n) {
            int32_t drafted = k;
            if (k < 0) {
                const Governor::Choice choice = governor.choose({{0, k_max, 0}});
                drafted = choice.drafter < 0 ? 0 : choice.k;
            }
            int32_t accepted = 0;
            while (accepted < drafted && uniform(rng) < world.acceptance) {
                accepted++;
            }
            const double target = world.target_us(drafted + 1) * std::max(0.5, normal(rng));
            const double draft = drafted == 0 || world.is_free ? 0.0 : world.draft_start_us + world.draft_us * drafted;
            us += target + draft;
            tokens += accepted + 1;
            last_k.push_back(drafted);
            if (k < 0) {
                governor.observe_length(accepted + 1);
                governor.observe_target(drafted + 1, target);
                if (drafted > 0) {
                    governor.observe_acceptance(0, 0, drafted, accepted);
                    if (!world.is_free) {
                        governor.observe_draft(0, drafted, draft);
                    }
                } else if (world.is_free) { // the shadow: what a proposal of full length would have had accepted
                    int32_t right = 0;
                    while (right < k_max && uniform(rng) < world.acceptance) {
                        right++;
                    }
                    governor.observe_acceptance(0, 0, k_max, right);
                }
            }
        }
        return static_cast<double>(tokens) / us;
    }

    std::mt19937 rng;
    Governor governor;
    std::vector<int32_t> last_k; // draft lengths of the last run
};

// Costs measured on CPUs and GPUs, in units of one row's.
double staircase(int32_t n) {
    return 1000.0 * (1.0 + 0.4 * (n - 1) + (n > 8 ? 1.0 : 0.0));
}
double memory_bound(int32_t n) {
    return 1000.0 * (1.0 + 0.1 * (n - 1));
}
double flat(int32_t n) {
    return 1000.0 * (1.0 + 0.01 * n);
}

void test_it_is_close_to_the_best_fixed_length() {
    for (const auto & target : {staircase, memory_bound, flat}) {
        for (const double acceptance : {0.0, 0.3, 0.6, 0.8, 0.95}) {
            for (const double draft_us : {0.0, 100.0, 300.0, 900.0}) {
                const World world = {target, draft_us, acceptance, draft_us == 0.0};
                double best = 0.0, plain = 0.0;
                for (int32_t k = 0; k <= k_max; k++) {
                    const double v = Simulation(1).run(world, 20000, k);
                    best = std::max(best, v);
                    plain = k == 0 ? v : plain;
                }
                Simulation simulation(2);
                const double v = simulation.run(world, 4000);
                assert(v >= 0.85 * best);
                assert(v >= 0.97 * plain);
            }
        }
    }
}

void test_it_reacts_when_the_text_changes() {
    World world = {memory_bound, 0.0, 0.9, true};
    Simulation simulation(3);
    simulation.run(world, 400);
    assert(simulation.last_k.back() >= 4);
    world.acceptance = 0.02;
    simulation.run(world, 40);
    const std::vector<int32_t> & k = simulation.last_k;
    assert(std::count_if(k.begin() + 10, k.end(), [](int32_t n) { return n > 2; }) <= 2);
    world.acceptance = 0.95;
    simulation.run(world, 120);
    assert(simulation.last_k.back() >= 4);
}

void test_one_slow_batch_does_not_stop_it() {
    World world = {memory_bound, 100.0, 0.9, false};
    Simulation simulation(4);
    simulation.run(world, 300);
    simulation.governor.observe_target(8, 500000.0); // another process woke up
    simulation.run(world, 300);
    assert(simulation.last_k.back() >= 3);
}

bool near(double value, double wanted) {
    return std::abs(value / wanted - 1.0) < 1e-9;
}

void test_costs_between_and_beyond_what_was_measured() {
    CostCurve rows = CostCurve::from_one(0.25);
    rows.observe(1, 100.0);
    assert(near(rows.at(3), 150.0) && !rows.knows_more_than_one());
    rows.observe(5, 180.0);
    assert(near(rows.at(3), 140.0) && near(rows.at(7), 220.0) && rows.knows_more_than_one());
    CostCurve drafts = CostCurve::from_zero(); // 80 to start, and 20 for each token
    drafts.observe(2, 120.0);
    assert(near(drafts.at(1), 60.0) && near(drafts.at(3), 180.0));
    assert(near(drafts.at(8), 480.0)); // nothing is known of a start yet
    drafts.observe(4, 160.0);
    assert(near(drafts.at(3), 140.0) && near(drafts.at(8), 240.0) && drafts.n_measured() == 2);
}

void test_of_two_first_times_the_shorter_counts() {
    CostCurve curve = CostCurve::from_one(0.0);
    curve.observe(1, 900.0);
    curve.observe(1, 100.0);
    assert(near(curve.at(1), 100.0));
    curve.observe(1, 1e9); // one slow time counts for at most twice the usual
    assert(curve.at(1) < 200.0);
}

// Sizes whose first measurements were lucky do not move what is known of the others.
void test_corrections_of_one_size_are_not_drift() {
    Governor governor;
    for (int32_t i = 0; i < 20; i++) {
        governor.observe_target(1, 100.0);
    }
    for (int32_t round = 0; round < 12; round++) {
        for (int32_t n = 2; n <= 6; n++) {
            governor.observe_target(n, (round < 2 ? 0.85 : 1.0) * (100.0 + 20.0 * n));
        }
    }
    assert(std::abs(governor.target_cost(1) / 100.0 - 1.0) < 0.15);
    for (int32_t round = 0; round < 30; round++) { // all slower: they follow
        governor.observe_target(4, 2.0 * 180.0);
    }
    assert(governor.target_cost(1) > 115.0);
}

// A draft costs more than its tokens: short ones do not pay, longer ones do.
void test_a_draft_has_a_start() {
    const World world = {[](int32_t n) { return 950.0 + 50.0 * n; }, 100.0, 0.9, false, 0.05, 0.1, 800.0};
    double best = 0.0;
    for (int32_t k = 0; k <= k_max; k++) {
        best = std::max(best, Simulation(1).run(world, 20000, k));
    }
    Simulation simulation(12);
    assert(simulation.run(world, 4000) >= 0.95 * best);
    const double drafted = simulation.governor.draft_cost(0, 8) / 1600.0;
    assert(std::abs(drafted - 1.0) < 0.1);
}

// While drafting pays, plain decoding is measured often enough to know that it does, and costs next to nothing.
void test_plain_decoding_is_measured_now_and_then() {
    Simulation simulation(11);
    const World world = {[](int32_t n) { return 100.0 + 12.0 * n; }, 10.0, 0.8, false};
    simulation.run(world, 3000);
    const auto n_plain = std::count(simulation.last_k.begin(), simulation.last_k.end(), 0);
    const double share = static_cast<double>(n_plain) / static_cast<double>(simulation.last_k.size());
    assert(share > 0.01 && share < 0.1);
}

void test_a_load_that_comes_and_goes() {
    World slow = {[](int32_t n) { return 10.0 * memory_bound(n); }, 1000.0, 0.9, false};
    World normal = {memory_bound, 100.0, 0.9, false};
    Simulation simulation(5);
    simulation.run(slow, 200);
    simulation.run(normal, 600);
    assert(simulation.last_k.back() >= 3);
}

void test_a_drafter_that_cannot_pay_is_left_alone() {
    const World world = {staircase, 1500.0, 1.0, false};
    Simulation simulation(6);
    simulation.run(world, 3000);
    assert(!simulation.governor.can_pay(0, k_max));
    const std::vector<int32_t> & k = simulation.last_k;
    assert(std::count_if(k.begin(), k.end(), [](int32_t n) { return n > 0; }) <= 8);
}

void test_a_draft_as_dear_as_the_target_is_not_tried() {
    World world = {memory_bound, 1000.0, 0.9, false};
    world.expected_cost = 1.0;
    Simulation simulation(9);
    simulation.run(world, 1000);
    assert(std::all_of(simulation.last_k.begin(), simulation.last_k.end(), [](int32_t k) { return k == 0; }));
}

void test_a_spoiled_first_measurement_does_not_lock_out() {
    World world = {memory_bound, 100.0, 0.9, false};
    Simulation simulation(10);
    simulation.governor.observe_target(1, 1000.0);
    simulation.governor.observe_target(4, 3000.0); // page faults, another process, ...
    simulation.governor.observe_draft(0, 3, 1500.0);
    simulation.run(world, 200);
    assert(simulation.last_k.back() >= 3);
}

void test_catching_up_is_paid_for() {
    // A draft that paid, then did not, and is dear to bring up to date: not tried again until it is not behind.
    World world = {memory_bound, 100.0, 0.9, false};
    Simulation simulation(13);
    simulation.run(world, 200);
    simulation.governor.observe_catch_up(0, 16, 16 * 300.0);
    world.acceptance = 0.0;
    simulation.run(world, 40);
    int64_t n_tries = 0, n_behind = 0;
    for (int32_t i = 0; i < 1000; i++) {
        const Governor::Choice choice = simulation.governor.choose({{0, k_max, 0, ++n_behind}});
        simulation.governor.observe_target(choice.k + 1, memory_bound(choice.k + 1));
        n_tries += choice.k > 0;
    }
    assert(n_tries == 0);
    simulation.governor.begin_text();
    assert(simulation.governor.choose({{0, k_max, 0, 0}}).k > 0); // the next request
}

// What catching up costs has to come back in what is left of the text.
void test_at_the_end_of_a_text_catching_up_does_not_pay() {
    const World world = {memory_bound, 100.0, 0.9, false};
    Simulation simulation(15);
    for (int32_t i = 0; i < 30; i++) {
        simulation.run(world, 20); // texts are as long as that
    }
    simulation.governor.observe_catch_up(0, 10, 10 * 300.0);
    assert(simulation.governor.choose({{0, k_max, 0, 10}}).k == 0);
    assert(simulation.governor.choose({{0, k_max, 0, 0}}).k > 0);
    simulation.governor.begin_text();
    assert(simulation.governor.choose({{0, k_max, 0, 10}}).k > 0);
}

// A 1.5B model in F16 on two cores: C(2) is dear.
double measured(int32_t n) {
    return n == 1 ? 780.0 : 1050.0 + 100.0 * n + (n > 4 ? 15.0 * (n - 4) : 0.0);
}

// A text of n tokens with a draft that costs 270 us a token, and 150 us for each one that it has missed: the first
// n_unlucky drafts are rejected whole, the others accepted with the given probability. Returns the time, relative to
// plain decoding.
double relative_time(Governor & governor, std::mt19937 & rng, int32_t n, int32_t n_unlucky, double acceptance) {
    std::uniform_real_distribution<double> uniform(0.0, 1.0);
    double us = 0.0;
    int64_t n_behind = 0;
    governor.begin_text();
    for (int32_t tokens = 0; tokens < n;) {
        const int32_t k = governor.choose({{0, k_max, 0, n_behind}}).k;
        int32_t accepted = 0;
        while (accepted < k && n_unlucky <= 0 && uniform(rng) < acceptance) {
            accepted++;
        }
        us += measured(k + 1);
        governor.observe_target(k + 1, measured(k + 1));
        governor.observe_length(accepted + 1);
        if (k > 0) {
            n_unlucky--;
            us += 150.0 * static_cast<double>(n_behind) + 270.0 * k;
            governor.observe_catch_up(0, n_behind, 150.0 * static_cast<double>(n_behind));
            governor.observe_draft(0, k, 270.0 * k);
            governor.observe_acceptance(0, 0, k, accepted);
        }
        n_behind = k > 0 ? 0 : n_behind + 1;
        tokens += accepted + 1;
    }
    return us / (n * measured(1));
}

void test_an_unlucky_start_is_not_the_end() {
    Governor governor;
    governor.expect(0, false, 0.3);
    std::mt19937 rng(14);
    for (int32_t i = 0; i < 10; i++) {
        relative_time(governor, rng, 200, 0, 0.5); // does not pay
    }
    double unlucky = 0.0;
    for (int32_t i = 0; i < 20; i++) {
        unlucky += relative_time(governor, rng, 300, 1, 0.97) / 20;
        relative_time(governor, rng, 200, 0, 0.5);
    }
    assert(unlucky < 0.92); // 0.79 without the start, 1.01 if nothing is tried after it
    double wrong = 0.0;
    for (int32_t i = 0; i < 20; i++) {
        wrong += relative_time(governor, rng, 200, 1000, 0.0) / 20; // nothing is ever right
    }
    assert(wrong < 1.03);
}

void test_one_right_guess_of_a_free_drafter_is_weak_evidence() {
    World world = {staircase, 0.0, 0.3, true}; // pays from an acceptance of about 0.45 on
    Simulation simulation(11);
    const double governed = simulation.run(world, 4000);
    assert(governed >= 0.98 * Simulation(12).run(world, 4000, 0));
}

} // namespace

int main() {
    test_it_is_close_to_the_best_fixed_length();
    test_it_reacts_when_the_text_changes();
    test_one_slow_batch_does_not_stop_it();
    test_costs_between_and_beyond_what_was_measured();
    test_of_two_first_times_the_shorter_counts();
    test_corrections_of_one_size_are_not_drift();
    test_a_draft_has_a_start();
    test_plain_decoding_is_measured_now_and_then();
    test_a_load_that_comes_and_goes();
    test_a_drafter_that_cannot_pay_is_left_alone();
    test_a_draft_as_dear_as_the_target_is_not_tried();
    test_a_spoiled_first_measurement_does_not_lock_out();
    test_catching_up_is_paid_for();
    test_at_the_end_of_a_text_catching_up_does_not_pay();
    test_an_unlucky_start_is_not_the_end();
    test_one_right_guess_of_a_free_drafter_is_weak_evidence();
    std::printf("governor: ok\n");
    return 0;
}
