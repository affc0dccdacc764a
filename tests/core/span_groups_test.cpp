// How spans are grouped, on a simulation of where llama.cpp's recurrent memory keeps the states of sequences.

#undef NDEBUG
#include <algorithm>
#include <cassert>
#include <cstdio>
#include <random>
#include <vector>

#include "llama/span_groups.h"

namespace {

using pyfly::group_spans;
using pyfly::Span;
using pyfly::SpanGroup;
using pyfly::Together;

constexpr size_t n_ubatch = 32;
constexpr size_t n_tail = 4; // tokens of a sequence that llama.cpp does not spread over two parts of a batch

// A part of a batch gathers its sequences in neighbouring cells, from the first of theirs on; who was there takes the
// cell that became free. Snapshots stay where they were written.
struct Cells {
    std::vector<size_t> cell_of, written_at; // of each sequence

    explicit Cells(size_t n) : cell_of(n), written_at(n) {
        for (size_t s = 0; s < n; s++) {
            cell_of[s] = written_at[s] = s;
        }
    }

    void evaluate_part(const std::vector<size_t> & sequences) {
        size_t first = cell_of.size();
        for (const size_t s : sequences) {
            first = std::min(first, cell_of[s]);
        }
        for (size_t i = 0; i < sequences.size(); i++) {
            const size_t other =
                static_cast<size_t>(std::find(cell_of.begin(), cell_of.end(), first + i) - cell_of.begin());
            std::swap(cell_of[sequences[i]], cell_of[other]);
        }
        for (const size_t s : sequences) {
            written_at[s] = cell_of[s];
        }
    }

    // Parts of as many tokens of each sequence, as llama.cpp splits a batch; what would leave a tail that is too short
    // waits.
    void evaluate_batch(const std::vector<Span> & spans, const SpanGroup & group) {
        std::vector<size_t> left;
        for (const size_t i : group) {
            left.push_back(spans[i].n);
        }
        while (true) {
            std::vector<size_t> open;
            for (size_t i = 0; i < group.size(); i++) {
                if (left[i] > 0) {
                    open.push_back(i);
                }
            }
            if (open.empty()) {
                return;
            }
            size_t n = n_ubatch / open.size();
            for (const size_t i : open) {
                n = std::min(n, left[i]);
            }
            size_t n_taken = 0;
            while (n_taken < open.size() && (left[open[n_taken]] == n || left[open[n_taken]] >= n + n_tail)) {
                n_taken++;
            }
            if (n_taken == 0) { // the first one alone, to its end
                n_taken = 1;
                n = left[open[0]] <= n_ubatch ? left[open[0]] : n_ubatch - n_tail;
            }
            std::vector<size_t> sequences;
            for (size_t i = 0; i < n_taken; i++) {
                left[open[i]] -= n;
                sequences.push_back(static_cast<size_t>(spans[group[open[i]]].sequence));
            }
            evaluate_part(sequences);
        }
    }
};

struct Counts {
    int lost = 0, batches = 0;
};

// Requests that are evaluated now and then. Snapshots of spans of one token are not needed.
Counts simulate(uint32_t seed, Together together) {
    constexpr int32_t n_sequences = 6;
    std::mt19937 rng(seed);
    Cells cells(n_sequences);
    Counts counts;
    for (int round = 0; round < 200; round++) {
        std::vector<Span> spans;
        for (int32_t s = 0; s < n_sequences; s++) {
            if (rng() % 4 != 0) {
                spans.push_back({s, nullptr, rng() % 8 == 0 ? 40 : 1 + rng() % 4, 0, 0});
            }
        }
        if (spans.empty()) {
            continue;
        }
        std::shuffle(spans.begin(), spans.end(), rng);
        const std::vector<SpanGroup> groups = group_spans(spans, n_ubatch, together);
        std::vector<size_t> seen;
        for (const SpanGroup & group : groups) {
            cells.evaluate_batch(spans, group);
            seen.insert(seen.end(), group.begin(), group.end());
        }
        std::sort(seen.begin(), seen.end());
        for (size_t i = 0; i < spans.size(); i++) {
            assert(seen.size() == spans.size() && seen[i] == i);
            const size_t s = static_cast<size_t>(spans[i].sequence);
            counts.lost += spans[i].n > 1 && cells.cell_of[s] != cells.written_at[s];
        }
        counts.batches += static_cast<int>(groups.size());
    }
    return counts;
}

void test_no_snapshots_are_left_behind() {
    int n_lost = 0;
    for (uint32_t seed = 0; seed < 50; seed++) {
        n_lost += simulate(seed, Together::all).lost;
        for (const Together together : {Together::none, Together::singles, Together::equal}) {
            assert(simulate(seed, together).lost == 0);
        }
    }
    assert(n_lost > 100); // the trap is there
}

void test_what_can_go_together_does() {
    const auto span = [](int32_t sequence, size_t n) { return Span{sequence, nullptr, n, 0, 0}; };
    const std::vector<Span> plain = {span(2, 1), span(0, 1), span(1, 1)};
    assert((group_spans(plain, n_ubatch, Together::equal) == std::vector<SpanGroup>{{1, 2, 0}}));
    const std::vector<Span> mixed = {span(0, 5), span(1, 1), span(2, 5), span(3, 3), span(4, 1)};
    assert((group_spans(mixed, n_ubatch, Together::equal) == std::vector<SpanGroup>{{1, 4}, {0, 2}, {3}}));
    assert((group_spans(mixed, n_ubatch, Together::all) == std::vector<SpanGroup>{{0, 1, 2, 3, 4}}));
    assert((group_spans(mixed, n_ubatch, Together::singles) == std::vector<SpanGroup>{{1, 4}, {0}, {2}, {3}}));
    assert((group_spans(mixed, n_ubatch, Together::none) == std::vector<SpanGroup>{{0}, {1}, {2}, {3}, {4}}));
    const std::vector<Span> large = {span(0, 12), span(1, 12), span(2, 12)};
    assert((group_spans(large, n_ubatch, Together::equal) == std::vector<SpanGroup>{{0, 1}, {2}}));
}

} // namespace

int main() {
    test_no_snapshots_are_left_behind();
    test_what_can_go_together_does();
    std::puts("ok");
    return 0;
}
