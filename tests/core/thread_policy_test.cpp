// The thread policy in simulated worlds, where it is known how many cores there are and who uses them. No clock is
// read.

#undef NDEBUG
#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "thread_policy.h"

namespace {

using pyfly::ThreadPolicy;

// A machine and what runs on it. Time is in microseconds since the beginning.
struct World {
    int32_t n_cores = 2;
    std::function<double(double)> busy = [](double) { return 0.0; }; // cores that other processes want
    bool sleeps = false;    // threads at a barrier sleep: they use CPU time only while they compute
    bool is_on_gpu = false; // threads make no difference
    bool sees_cores = true;
    double quota = 1e9;      // cores that a control group grants, of those there are
    double smt_slowdown = 1; // a neighbour shares a core's units with us, both run on
    double stall = 4.0;      // mean wait of a contended evaluation for threads without a core, in its own time
    double noise = 0.05;
    std::vector<double> step = {20e3}; // single-threaded time of the evaluations of a step, each a kind of its own
};

struct Simulation {
    explicit Simulation(World w, uint32_t seed = 1)
        : world(std::move(w)), policy(world.n_cores, world.sees_cores), rng(seed) {}

    // Runs for so many microseconds; returns steps per second. n > 0: with so many threads.
    double run(double duration, int32_t n = 0) {
        const double end = us + duration;
        int64_t n_steps = 0;
        const double begun = us;
        while (us < end) {
            for (size_t kind = 0; kind < world.step.size(); kind++) {
                evaluate(static_cast<int32_t>(kind) + 1, world.step[kind], n);
            }
            n_steps++;
        }
        return static_cast<double>(n_steps) / (us - begun) * 1e6;
    }

    // Neighbours come and go within an evaluation, so it runs in parts of at most 10 ms of work.
    void evaluate(int32_t kind, double work, int32_t fixed) {
        const int32_t n = fixed > 0 ? fixed : policy.n_threads();
        const double n_parts = std::ceil(work / 10e3);
        double wall = 0.0, cpu = 0.0, cores = 0.0;
        for (int32_t part = 0; part < n_parts; part++) {
            const double took = run_part(work / n_parts, n, world.busy(us), cores);
            us += took;
            wall += took;
            cpu += took * cores * (world.sleeps ? 0.6 : 1.0);
        }
        if (fixed > 0) {
            return;
        }
        policy.observe({1, kind, wall, cpu});
        // Others keep what we leave them only as far as they want it.
        if (world.sees_cores && policy.wants_cores() && us - seen_at > 100e3) {
            policy.observe_cores(std::max(cores, world.n_cores - world.busy(us)));
            seen_at = us;
        }
    }

    // Returns the time that it takes, and the cores that it gets.
    double run_part(double work, int32_t n, double busy, double & cores) {
        const double all = world.n_cores;
        std::exponential_distribution<double> exponential(1.0);
        std::normal_distribution<double> normal(1.0, world.noise);
        const bool is_contended = n + busy > all;
        cores = is_contended ? n * all / (n + busy) : n; // what a fair scheduler gives us
        double wall = work / cores;
        if (is_contended && n > 1) {
            wall = work / n * (1.0 + world.stall * std::min(1.0, n + busy - all) * exponential(rng));
        }
        if (world.smt_slowdown > 1.0 && n > all - busy) {
            cores = n;
            wall = work / n * world.smt_slowdown;
        }
        if (cores > world.quota) {
            wall *= cores / world.quota;
            cores = world.quota;
        }
        if (world.is_on_gpu) {
            wall = work / all;
            cores = 1.0;
        }
        return wall * std::max(0.5, normal(rng));
    }

    World world;
    ThreadPolicy policy;
    std::mt19937 rng;
    double us = 0.0, seen_at = 0.0;
};

constexpr double second = 1e6;

double one(double) {
    return 1.0;
}

// Steps per second against those of a fixed thread count.
double gain(const World & world, double duration, int32_t fixed, uint32_t n_seeds = 4) {
    double sum = 0.0, other = 0.0;
    for (uint32_t seed = 1; seed <= n_seeds; seed++) {
        sum += Simulation(world, seed).run(duration);
        other += Simulation(world, seed + 100).run(duration, fixed);
    }
    return sum / other;
}

// Worlds are tried with steps of one short evaluation, of one long, and of several: a draft and its verification.
const std::vector<std::vector<double>> steps = {{20e3}, {300e3}, {10e3, 5e3, 5e3, 5e3, 5e3, 5e3, 60e3}};

template <typename Check> void each_world(World world, Check check) {
    for (const bool sees_cores : {true, false}) {
        for (const std::vector<double> & step : steps) {
            world.sees_cores = sees_cores;
            world.step = step;
            check(world);
        }
    }
}

void test_idle_costs_nothing() {
    for (const int32_t n_cores : {1, 2, 16}) {
        World idle;
        idle.n_cores = n_cores;
        each_world(idle, [&](const World & world) {
            Simulation simulation(world);
            simulation.run(30 * second);
            assert(simulation.policy.n_threads() == n_cores);
            assert(simulation.policy.n_trials() == 0);
        });
    }
}

// Cores are missing, but not because others use them: nothing may be lost.
void test_other_reasons_for_missing_cores() {
    World gpu, sleeping, quota;
    gpu.is_on_gpu = sleeping.sleeps = true;
    gpu.n_cores = quota.n_cores = 8;
    quota.quota = 2.0;
    for (const World & w : {gpu, sleeping, quota}) {
        each_world(w, [](const World & world) { assert(gain(world, 60 * second, world.n_cores) > 0.975); });
    }
}

void test_busy_neighbour() {
    World beside_one;
    beside_one.busy = one;
    each_world(beside_one, [](const World & world) {
        assert(gain(world, 30 * second, 2) > 1.8);
        assert(gain(world, 30 * second, 1) > 0.75);
    });
    World of_many = beside_one;
    of_many.n_cores = 16;
    of_many.busy = [](double) { return 4.0; };
    each_world(of_many, [](const World & world) {
        assert(gain(world, 30 * second, 16) > 3.0);
        assert(gain(world, 30 * second, 12) > 0.95);
    });
    of_many.n_cores = 64;
    of_many.busy = one;
    each_world(of_many, [](const World & world) { assert(gain(world, 30 * second, 63) > 0.95); });
}

void test_more_neighbours_than_cores() {
    World crowded;
    crowded.busy = [](double) { return 2.0; };
    each_world(crowded, [](const World & world) { assert(gain(world, 30 * second, 2) > 1.25); });
    crowded.n_cores = 16;
    crowded.busy = [](double) { return 16.0; };
    each_world(crowded, [](const World & world) { assert(gain(world, 30 * second, 16) > 0.85); });
}

// Neighbours come for nine seconds, and all threads are used again soon after they have gone.
void test_neighbours_come_and_go() {
    const auto check = [](World world, double n_busy) {
        for (uint32_t seed = 1; seed <= 40; seed++) {
            const double begin = 6 * second + seed * 7e3; // anywhere in a window
            world.busy = [=](double us) { return us > begin && us < begin + 9 * second ? n_busy : 0.0; };
            Simulation simulation(world, seed);
            simulation.run(5 * second);
            assert(simulation.policy.n_threads() == 2);
            simulation.run(9 * second);
            assert(simulation.policy.n_threads() == 1);
            simulation.run((world.sees_cores ? 3.3 : 300) * second);
            assert(simulation.policy.n_threads() == 2);
        }
    };
    each_world({}, [&](const World & world) { check(world, 1.0); });
    // A failed trial beside two of them is dear, and must not keep all threads from coming back.
    World crowded;
    crowded.stall = 40.0; // seen: an evaluation of 10 ms that took 0.5 s
    check(crowded, 2.0);
}

// Times of two threads from before it became worse are no reason to go back, where it can be seen that no core is free.
void test_what_two_threads_once_took() {
    ThreadPolicy policy(2, true);
    const auto evaluations = [&](int32_t n, double us, double n_cores, double n_free) {
        for (int32_t i = 0; i < n; i++) {
            policy.observe({1, 1, us, us * n_cores});
            if (policy.wants_cores()) {
                policy.observe_cores(n_free);
            }
        }
    };
    evaluations(20, 10e3, 1.5, 0.0);
    assert(policy.n_threads() == 1); // on trial
    evaluations(20, 9e3, 1.0, 1.0);
    assert(policy.n_changes() == 1);
    evaluations(100, 30e3, 0.7, 0.7); // a second neighbour
    assert(policy.n_trials() == 1);
    while (policy.n_trials() == 1) {
        evaluations(1, 30e3, 0.7, 2.0); // a moment without them
    }
    assert(policy.n_threads() == 2);
    evaluations(1, 500e3, 0.7, 0.7);
    assert(policy.n_threads() == 1 && policy.n_changes() == 1); // it failed, and was dear
    evaluations(100, 30e3, 0.7, 2.0);
    assert(policy.n_trials() == 2); // for a while, the same is not tried again
}

// A machine that is busy from the beginning is begun with the free cores; cores that become free later are used.
void test_the_beginning() {
    World world;
    world.busy = [](double us) { return us < 5 * second ? 1.0 : 0.0; };
    each_world(world, [](const World & w) {
        Simulation simulation(w);
        simulation.policy.begin_with(1.1);
        assert(simulation.policy.n_threads() == 1);
        simulation.run(4 * second);
        assert(simulation.policy.n_threads() == 1 || !w.sees_cores);
        simulation.run(60 * second);
        assert(simulation.policy.n_threads() == 2);
    });
    for (const auto & [n_cores, n_threads] : {std::pair{0.0, 1}, {1.7, 2}, {3.0, 3}, {9.0, 4}}) {
        ThreadPolicy policy(4, true);
        policy.begin_with(n_cores);
        assert(policy.n_threads() == n_threads);
    }
}

void test_moments_of_work_are_ignored() {
    World world;
    world.busy = [](double us) { return std::fmod(us, 10 * second) < 0.1 * second ? 1.0 : 0.0; };
    each_world(world, [](const World & w) { assert(gain(w, 60 * second, 2) > 0.94); });
    world.busy = [](double us) { return std::fmod(us, second) < 0.1 * second ? 1.0 : 0.0; };
    each_world(world, [](const World & w) { assert(gain(w, 60 * second, 2) > 0.92); });
}

// A prompt that comes during a trial, in batches of a kind that is not known, does not run on trial for long.
void test_a_prompt_during_a_trial() {
    ThreadPolicy policy(16, false);
    while (policy.n_trials() == 0) {
        policy.observe({1, 1, 20e3, 60e3});
    }
    int32_t n_on_trial = 0;
    for (int32_t i = 0; i < 32; i++) {
        n_on_trial += policy.n_threads() < 16;
        policy.observe({1, 512, 8e6, 24e6});
    }
    assert(n_on_trial <= 16);
}

// Kinds that never come again decide nothing, and no trial lasts for ever.
void test_kinds_that_do_not_repeat() {
    ThreadPolicy policy(2, true);
    for (uint64_t context = 0; context < 1000; context++) {
        policy.observe({context, 1, 60e3, 60e3});
    }
    assert(policy.n_changes() == 0);
    assert(policy.n_trials() > 1);
}

} // namespace

int main() {
    test_idle_costs_nothing();
    test_other_reasons_for_missing_cores();
    test_busy_neighbour();
    test_more_neighbours_than_cores();
    test_neighbours_come_and_go();
    test_what_two_threads_once_took();
    test_the_beginning();
    test_moments_of_work_are_ignored();
    test_a_prompt_during_a_trial();
    test_kinds_that_do_not_repeat();
    std::puts("thread policy: all tests passed");
    return 0;
}
