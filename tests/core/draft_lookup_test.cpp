// Guesses at a draft model's tokens: what is guessed, and how many.

#undef NDEBUG
#include <cassert>
#include <cstdio>
#include <vector>

#include "drafters/draft_lookup.h"

using pyfly::DraftLookup;
using Tokens = std::vector<int32_t>;

namespace {

// 1 ... 20, and then what it begins with.
Tokens repeating() {
    Tokens text;
    for (int32_t i = 1; i <= 20; i++) {
        text.push_back(i);
    }
    text.insert(text.end(), {1, 2});
    return text;
}

void test_what_followed_the_last_two_tokens_is_guessed() {
    DraftLookup lookup;
    assert((lookup.guess(0, repeating(), 2) == Tokens{3, 4}));
    assert((lookup.guess(0, repeating(), 1) == Tokens{3}));
    assert(lookup.guess(0, repeating(), 0).empty());
    assert(lookup.guess(0, {7}, 8).empty());
    assert(lookup.guess(0, {1, 2, 3, 9, 2}, 8).empty()); // 9, 2 is new
}

void test_the_number_follows_the_outcome_of_each_request() {
    DraftLookup lookup;
    const auto n = [&](int32_t slot) { return lookup.guess(slot, repeating(), 16).size(); };
    assert(n(0) == 2 && n(1) == 2);
    lookup.learn(0, 2, 2);
    assert(n(0) == 4 && n(1) == 2);
    lookup.learn(0, 4, 4);
    lookup.learn(0, 8, 8);
    assert(n(0) == 16);
    lookup.learn(0, 3, 3); // there was room for three
    assert(n(0) == 16);
    lookup.learn(0, 16, 5);
    assert(n(0) == 5);
    lookup.learn(0, 5, 0);
    assert(n(0) == 1 && n(1) == 2);
    lookup.learn(0, 1, 0);
    assert(n(0) == 1);
}

void test_a_text_that_is_taken_back_is_forgotten() {
    DraftLookup lookup;
    Tokens text = repeating();
    assert((lookup.guess(0, text, 2) == Tokens{3, 4}));
    text = {1, 2, 9, 9, 1, 2};
    assert((lookup.guess(0, text, 2) == Tokens{9, 9}));
}

void test_a_request_of_another_owner_begins_anew() {
    DraftLookup lookup;
    lookup.learn(0, 2, 2);
    lookup.learn(1, 2, 2);
    lookup.forget(0);
    lookup.forget(7); // had none yet
    assert(lookup.guess(0, repeating(), 16).size() == 2 && lookup.guess(1, repeating(), 16).size() == 4);
    lookup.forget(0);
    assert((lookup.guess(0, repeating(), 2) == Tokens{3, 4}));
}

} // namespace

int main() {
    test_what_followed_the_last_two_tokens_is_guessed();
    test_the_number_follows_the_outcome_of_each_request();
    test_a_text_that_is_taken_back_is_forgotten();
    test_a_request_of_another_owner_begins_anew();
    std::printf("draft lookup: ok\n");
    return 0;
}
