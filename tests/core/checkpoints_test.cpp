// States that are kept of a recurrent memory: which are there, which go, and what sequences have in common.

#undef NDEBUG
#include <cassert>
#include <cstdio>
#include <vector>

#include "checkpoints.h"
#include "rewind.h"

namespace {

pyfly::Checkpoints::State state(size_t n_bytes) {
    return std::make_shared<const std::vector<uint8_t>>(n_bytes);
}

std::vector<int32_t> places(const pyfly::Checkpoints & of) {
    std::vector<int32_t> out;
    for (const auto & checkpoint : of.all()) {
        out.push_back(checkpoint.n);
    }
    return out;
}

void test_the_state_of_a_draft_is_replaced_and_the_others_stay() {
    pyfly::Checkpoints all;
    all.add(10, state(1), true);
    all.add(20, state(1), false);
    all.add(15, state(1), true);
    assert((places(all) == std::vector<int32_t>{10, 15})); // the draft's went
    all.add(30, state(1), false);
    assert(all.longest(29)->n == 15 && all.longest(30)->n == 30 && all.longest(9) == nullptr);
    assert(all.n_kept(100) == 15 && all.n_kept(14) == 10 && all.n_kept(9) == 0);
    all.keep(30);
    all.add(40, state(1), false);
    assert((places(all) == std::vector<int32_t>{10, 15, 30, 40}));
    all.forget_behind(29);
    assert((places(all) == std::vector<int32_t>{10, 15}));
}

void test_a_buffer_is_used_again_unless_it_is_shared() {
    pyfly::Checkpoints all;
    const auto first = all.take_buffer();
    const auto * address = first.get();
    all.add(5, first, false);
    const pyfly::Checkpoints::State shared = all.longest(5)->state;
    assert(all.take_buffer().get() != address && all.all().empty());
}

void test_the_one_that_saves_least_goes_first() {
    pyfly::Checkpoints all;
    for (const int32_t n : {100, 110, 500, 900}) {
        all.add(n, state(10), true);
    }
    pyfly::bound({&all}, 0, 900, 3, 1000);
    assert((places(all) == std::vector<int32_t>{100, 500, 900}));
    pyfly::bound({&all}, 0, 100, 1, 1000); // never the last one
    assert((places(all) == std::vector<int32_t>{100}));
}

void test_bytes_are_bounded_over_all_sequences() {
    std::vector<pyfly::Checkpoints> sequences(3);
    std::vector<pyfly::Checkpoints *> all;
    const pyfly::Checkpoints::State shared = state(100);
    for (auto & sequence : sequences) {
        all.push_back(&sequence);
        sequence.add(1000, shared, true); // it counts once
    }
    for (int32_t i = 0; i < 3; i++) {
        sequences[static_cast<size_t>(i)].add(1010 + i, state(100), true);
    }
    pyfly::bound(all, 2, 1012, 16, 400);
    assert(places(sequences[0]).size() == 2 && places(sequences[2]).size() == 2);
    sequences[1].add(2000, state(100), true);
    pyfly::bound(all, 1, 2000, 16, 400);
    assert((places(sequences[0]) == std::vector<int32_t>{1000})); // ten tokens
    assert((places(sequences[1]) == std::vector<int32_t>{1000, 1011, 2000}));
    pyfly::bound(all, 1, 2000, 16, 0); // four stay, however large
    assert((places(sequences[1]) == std::vector<int32_t>{1000, 1011, 2000}));
}

void test_who_begins_alike_has_the_shorter_ones_too() {
    pyfly::Checkpoints from, to;
    from.add(50, state(5), true);
    from.add(90, state(9), true);
    from.add(120, state(12), true);
    from.add(70, state(7), false);
    to.share(from, 90);
    assert((places(to) == std::vector<int32_t>{50, 90}) && to.n_kept(90) == 90);
    assert(to.longest(60)->state == from.longest(60)->state);
}

void test_what_is_dropped_after_it_was_planned_is_gone_back_to_all_the_same() {
    pyfly::Rewind rewind(0);
    rewind.checkpoints().add(50, state(7), true);
    assert(rewind.truncate(100, 60) == 50 && rewind.n_left(100) == 50);
    rewind.checkpoints().drop(50);
    const pyfly::Rewind::Plan plan = rewind.take();
    assert(plan.way == pyfly::Rewind::Way::checkpoint && plan.n == 50 && plan.state->size() == 7);
}

} // namespace

int main() {
    test_the_state_of_a_draft_is_replaced_and_the_others_stay();
    test_a_buffer_is_used_again_unless_it_is_shared();
    test_the_one_that_saves_least_goes_first();
    test_bytes_are_bounded_over_all_sequences();
    test_who_begins_alike_has_the_shorter_ones_too();
    test_what_is_dropped_after_it_was_planned_is_gone_back_to_all_the_same();
    std::printf("checkpoints: ok\n");
    return 0;
}
