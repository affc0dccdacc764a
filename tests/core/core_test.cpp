// The pure core against slow, obvious references, on random and on awkward input. Built with sanitizers by
// test_sanitizers.py; no model, no llama.cpp, no Python.

#undef NDEBUG
#include <algorithm>
#include <atomic>
#include <cassert>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "pyfly.h"
#include "rows.h"

namespace {

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

// Batches run on several threads.
thread_local pyfly_error error;
thread_local std::mt19937 rng(7);

int32_t random_int(int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(rng);
}

std::vector<float> random_row(size_t n) {
    std::vector<float> row(n);
    std::normal_distribution<float> normal(0.0f, std::uniform_real_distribution<float>(0.1f, 8.0f)(rng));
    for (float & x : row) {
        x = random_int(0, 20) == 0 ? -inf : normal(rng);
    }
    row[static_cast<size_t>(random_int(0, static_cast<int32_t>(n) - 1))] = 1.0f; // never all forbidden
    return row;
}

void test_rows() {
    for (const size_t n : {1, 2, 15, 16, 17, 63, 64, 65, 1023, 1024, 1025, 4099, 49152, 151936}) {
        const std::vector<float> row = random_row(n);
        size_t best = 0;
        for (size_t i = 0; i < n; i++) {
            best = row[i] > row[best] ? i : best;
        }
        double sum = 0.0, entropy = 0.0;
        for (const float x : row) {
            sum += std::exp(static_cast<double>(x) - row[best]);
        }
        for (const float x : row) {
            const double lp = static_cast<double>(x) - row[best] - std::log(sum);
            entropy -= std::isfinite(lp) ? std::exp(lp) * lp : 0.0;
        }
        const pyfly::RowStats stats = pyfly::row_stats(row.data(), n, 3);
        assert(stats.max.finite && stats.max.token == static_cast<int32_t>(best));
        assert(std::fabs(stats.log_sum_exp - (row[best] + std::log(sum))) < 1e-5);
        assert(std::fabs(stats.entropy - entropy) < 1e-5);
        for (const float bad : {nan, inf}) {
            std::vector<float> broken = row;
            broken[static_cast<size_t>(random_int(0, static_cast<int32_t>(n) - 1))] = bad;
            assert(!pyfly::row_stats(broken.data(), n, 3).max.finite);
            assert(!pyfly::row_max(broken.data(), n).finite);
        }
        const std::vector<float> forbidden(n, -inf);
        assert(!pyfly::row_max(forbidden.data(), n).finite);
        const std::vector<float> flat(n, 2.5f);
        assert(pyfly::row_max(flat.data(), n).token == 0); // ties: the lowest
    }
}

// What the n tokens before position `at` of `of` and the last tokens of h have in common; 0 where nothing follows.
int32_t n_alike(const std::vector<int32_t> & h, const std::vector<int32_t> & of, size_t at) {
    int32_t n = 0;
    while (at < of.size() && of[at] >= 0 && n < 64 && static_cast<size_t>(n) < std::min(at, h.size()) &&
           of[at - static_cast<size_t>(n) - 1] == h[h.size() - static_cast<size_t>(n) - 1]) {
        n++;
    }
    return n;
}

// What prompt lookup proposes, rule by rule: scans the history and the other texts for the pattern.
std::vector<int32_t> slow_lookup(const std::vector<int32_t> & h, int32_t max_n, int32_t min_n, bool earliest,
                                 const std::vector<std::vector<int32_t>> & others) {
    std::vector<int32_t> out;
    int32_t n_best = min_n - 1;
    for (size_t size = static_cast<size_t>(max_n); earliest && size >= static_cast<size_t>(min_n); size--) {
        for (size_t at = size; at + size <= h.size() && out.empty(); at++) {
            if (n_alike(h, h, at) >= static_cast<int32_t>(size)) {
                n_best = n_alike(h, h, at);
                out.assign(h.begin() + static_cast<std::ptrdiff_t>(at), h.end());
            }
        }
    }
    const auto look_in = [&](const std::vector<int32_t> & text) {
        int32_t n_most = 0;
        for (size_t at = 0; at < text.size(); at++) {
            n_most = std::max(n_most, n_alike(h, text, at));
        }
        for (size_t at = text.size(); at-- > 0 && n_most > n_best;) {
            if (n_alike(h, text, at) == n_most) {
                n_best = n_most;
                const auto first = text.begin() + static_cast<std::ptrdiff_t>(at);
                out.assign(first, std::find(first, text.end(), -1));
            }
        }
    };
    if (!earliest) {
        look_in(h);
    }
    for (const std::vector<int32_t> & text : others) {
        look_in(text);
    }
    return out;
}

void test_lookup() {
    for (int32_t run = 0; run < 90; run++) {
        const bool earliest = run % 2 == 1;
        const int32_t max_n = random_int(1, 5), min_n = random_int(1, max_n);
        std::vector<std::vector<int32_t>> others(2); // answers, named texts
        for (size_t i = 0; i < 2 && run % 3 != 0; i++) {
            for (int32_t n = random_int(0, 200); n > 0; n--) {
                others[i].push_back(random_int(-1, 3));
            }
        }
        const pyfly_lookup_config config = {max_n, min_n, 8, earliest, 250};
        pyfly_drafter * drafter = nullptr;
        assert(pyfly_drafter_lookup_new(nullptr, &config, others[1].data(), others[1].size(), others[0].data(),
                                        others[0].size(), &drafter, &error) == PYFLY_OK);
        std::vector<int32_t> history;
        for (int32_t step = 0; step < 60; step++) {
            if (random_int(0, 3) == 0 && !history.empty()) {
                history.resize(static_cast<size_t>(random_int(0, static_cast<int32_t>(history.size()))));
            }
            for (int32_t i = random_int(1, 6); i > 0; i--) {
                history.push_back(random_int(0, 3));
            }
            std::vector<int32_t> expected = slow_lookup(history, max_n, min_n, earliest, others);
            const int32_t n_max = random_int(1, 10);
            expected.resize(std::min({expected.size(), static_cast<size_t>(n_max), static_cast<size_t>(8)}));
            std::vector<int32_t> out(static_cast<size_t>(n_max));
            int32_t n_out = 0;
            assert(pyfly_drafter_propose(drafter, history.data(), history.size(), n_max, out.data(), &n_out, &error) ==
                   PYFLY_OK);
            out.resize(static_cast<size_t>(n_out));
            assert(out == expected);
        }
        pyfly_drafter_free(drafter);
    }
    pyfly_drafter_free(nullptr);
}

// A model of 12 tokens whose row is a hash of the history. Requests that begin with `broken` fail in the end.
constexpr int32_t n_vocab = 12, broken = 11;
constexpr const char * pieces[n_vocab] = {"",   "a",       "\n",   "`",    "```\n", "1",
                                          " +", "<think>", "</th", "ink>", "\xe2",  "~~~"};

int32_t scripted_row(void * user, const int32_t * history, size_t n, float * out) {
    if (history[0] == broken && n > 90) {
        return 1;
    }
    uint32_t hash = *static_cast<uint32_t *>(user);
    for (size_t i = n > 3 ? n - 3 : 0; i < n; i++) {
        hash = (hash ^ static_cast<uint32_t>(history[i])) * 16777619u;
    }
    for (int32_t token = 0; token < n_vocab; token++) {
        hash = hash * 1664525u + 1013904223u;
        out[token] = static_cast<float>(hash >> 16) / 16384.0f;
    }
    return 0;
}

int32_t random_draft(void *, const int32_t *, size_t, int32_t * out, float * rows, size_t capacity) {
    const int32_t n = random_int(0, static_cast<int32_t>(capacity));
    for (size_t i = 0; rows != nullptr && i < capacity * n_vocab; i++) {
        rows[i] = static_cast<float>(random_int(-4, 4));
    }
    for (int32_t i = 0; i < n; i++) {
        out[i] = random_int(0, n_vocab - 1);
    }
    return n;
}

pyfly_scripted_config random_model(int32_t n_sequences, int64_t n_cells) {
    pyfly_scripted_config config = {n_vocab, 200, 32, n_sequences, n_cells, -1, 1, pieces};
    if (random_int(0, 1) == 1) { // a recurrent memory
        config.n_snapshots = random_int(0, 9);
        config.has_checkpoints = random_int(0, 1);
    }
    return config;
}

pyfly_gate_node loose_gate(bool has_rows) {
    switch (random_int(0, has_rows ? 6 : 4)) {
        case 3:
            return {PYFLY_GATE_NO_REPEAT, random_int(1, 9), 0.0, 0.0};
        case 5:
        case 6:
            return {random_int(PYFLY_GATE_FUZZY_KL, PYFLY_GATE_FUZZY_TV), random_int(0, 3), 0.4, 0.0};
        case 0:
            return {PYFLY_GATE_TYPICAL, 0, 0.3, 0.5};
        case 1:
            return {PYFLY_GATE_RELAXED, random_int(1, 32), 0.6, 0.0};
        case 2:
            return {PYFLY_GATE_EXACT_FIRST, random_int(0, 9), 0.0, 0.0};
        default:
            return {PYFLY_GATE_MARGIN, 0, 1.0, 0.0};
    }
}

pyfly_request request_of(const std::vector<int32_t> & text, const pyfly_gate_node & gate) {
    pyfly_request request = {};
    request.history = text.data();
    request.n_history = text.size();
    request.n_evaluated = -1;
    request.gate = &gate;
    request.n_gate = 1;
    const int32_t rule = random_int(0, 1);
    request.settings.window = {random_int(0, 6), rule, -1, rule == PYFLY_WINDOW_RECONVERGE ? random_int(0, 1) : 0};
    request.settings.trace = random_int(0, 1);
    request.settings.keep_rows = random_int(0, 1);
    return request;
}

// Several requests at once that join, leave and fail: exact ones commit what the model chooses. Returns how many steps
// there were, of all requests.
int64_t test_batches(uint32_t begin, uint32_t end) {
    int64_t n_steps = 0;
    for (uint32_t seed = begin; seed < end; seed++) {
        const int32_t n_slots = seed % 2 == 0 ? 1 : random_int(2, 8);
        pyfly_target * target = nullptr;
        pyfly_drafter *drafter = nullptr, *lookup = nullptr;
        pyfly_batch * batch = nullptr;
        const pyfly_scripted_config model = random_model(n_slots, n_slots == 1 ? 200 : random_int(210, 200 * n_slots));
        const bool has_rows = seed % 3 != 0;
        assert(pyfly_target_scripted_new(&model, scripted_row, &seed, &target, &error) == PYFLY_OK);
        const char * const markers[] = {"</think>", "a\n", "+1"};
        assert(pyfly_target_protect_texts(target, markers, 3, &error) == PYFLY_OK);
        assert(pyfly_drafter_callback_new(random_draft, nullptr, has_rows ? model.n_vocab : 0, &drafter, &error) ==
               PYFLY_OK);
        const pyfly_lookup_config looks = {3, 1, 6, 0, 500};
        assert(pyfly_drafter_lookup_new(target, &looks, nullptr, 0, nullptr, 0, &lookup, &error) == PYFLY_OK);
        assert(pyfly_batch_new(target, &batch, &error) == PYFLY_OK);
        const pyfly_batch_config config = {random_int(0, 1), random_int(0, 8), random_int(0, 2)};
        const pyfly_batch_drafter drafters[2] = {{lookup, random_int(0, 9)}, {drafter, random_int(1, 9)}};
        assert(pyfly_batch_configure(batch, &config, drafters, 2, &error) == PYFLY_OK);
        pyfly_costs costs;
        assert(pyfly_batch_measure(batch, &costs, &error) == PYFLY_OK && costs.n_drafts == 0);
        assert(pyfly_batch_expect(batch, &costs, &error) == PYFLY_OK);
        const pyfly_gate_node exact = {PYFLY_GATE_EXACT, 0, 0.0, 0.0}, loose = loose_gate(has_rows);
        const bool is_exact = seed % 4 < 2;
        std::vector<std::vector<int32_t>> texts(static_cast<size_t>(n_slots));
        int32_t n_begun = 0, n_ended = 0;
        while (n_ended < 2 * n_slots) {
            if (n_begun < 2 * n_slots && random_int(0, 2) == 0) {
                std::vector<int32_t> text = {random_int(0, 9) == 0 ? broken : 1, 2, 3};
                for (int32_t i = random_int(0, 60); i > 0; i--) {
                    text.push_back(random_int(0, 2));
                }
                const int32_t slot = pyfly_batch_find_slot(batch, text.data(), text.size(), 0);
                if (slot >= 0) {
                    const pyfly_request request = request_of(text, is_exact ? exact : loose);
                    assert(pyfly_batch_begin(batch, slot, &request, &error) == PYFLY_OK);
                    texts[static_cast<size_t>(slot)] = text;
                    n_begun++;
                }
            }
            if (n_begun == n_ended) {
                continue;
            }
            std::vector<pyfly_progress> progress(static_cast<size_t>(n_slots));
            size_t n_progress = 0;
            assert(pyfly_batch_step(batch, progress.data(), &n_progress, &error) == PYFLY_OK);
            for (size_t p = 0; p < n_progress; p++) {
                const int32_t slot = progress[p].slot;
                std::vector<int32_t> & text = texts[static_cast<size_t>(slot)];
                size_t n_records = 0;
                const pyfly_record * records = pyfly_batch_records(batch, slot, &n_records);
                assert(n_records == progress[p].n_records);
                for (size_t i = 0; i < n_records; i++) {
                    assert(records[i].position == static_cast<int32_t>(text.size()));
                    if (is_exact) {
                        float row[n_vocab];
                        scripted_row(&seed, text.data(), text.size(), row);
                        assert(records[i].token == pyfly::row_max(row, n_vocab).token);
                    }
                    text.push_back(records[i].token);
                }
                if (progress[p].status != PYFLY_OK) {
                    const bool is_broken = progress[p].status == PYFLY_STATUS_CALLBACK;
                    assert(is_broken ? text[0] == broken : progress[p].status == PYFLY_STATUS_CONTEXT_FULL);
                    assert(is_broken || !is_exact || text.size() == 201);
                    pyfly_stats stats;
                    pyfly_batch_stats(batch, slot, &stats);
                    pyfly_batch_reset_stats(batch, slot);
                    n_steps += stats.steps;
                    assert(pyfly_batch_end(batch, slot, -1, &error) == PYFLY_OK);
                    n_ended++;
                } else if (n_slots > 1 && random_int(0, 60) == 0) { // cancelled
                    assert(pyfly_batch_end(batch, slot, -1, &error) == PYFLY_OK);
                    n_ended++;
                } else if (n_slots == 1 && n_records > 0 && random_int(0, 9) == 0) {
                    assert(pyfly_batch_park(batch, slot, text.size() - 1, &error) == PYFLY_OK);
                    assert(pyfly_batch_n_evaluated(batch, slot) == text.size() - 1);
                }
            }
        }
        pyfly_batch_free(batch);
        pyfly_drafter_free(drafter);
        pyfly_drafter_free(lookup);
        pyfly_target_free(target);
    }
    return n_steps;
}

// Batches on several threads share nothing but code.
void test_threads() {
    std::atomic<int64_t> n_steps = 0;
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < 4; i++) {
        threads.emplace_back([&n_steps, i] {
            rng.seed(i);
            n_steps += test_batches(i * 40, (i + 1) * 40);
        });
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
    assert(n_steps > 10000);
}

// KL(q || p), KL(p || q), both to the mean, the mean to both, half of what they differ by.
double reference_divergence(int32_t kind, const std::vector<float> & p_row, const std::vector<float> & q_row) {
    const auto ln_of = [](const std::vector<float> & row) {
        const double max = static_cast<double>(*std::max_element(row.begin(), row.end()));
        double sum = 0.0;
        for (const float x : row) {
            sum += std::exp(static_cast<double>(x) - max);
        }
        std::vector<double> ln;
        for (const float x : row) {
            ln.push_back(static_cast<double>(x) - max - std::log(sum));
        }
        return ln;
    };
    const auto kl = [](double ln_a, double ln_b) { return ln_a > -1e300 ? std::exp(ln_a) * (ln_a - ln_b) : 0.0; };
    const std::vector<double> ln_p = ln_of(p_row), ln_q = ln_of(q_row);
    double sum = 0.0;
    for (size_t i = 0; i < ln_p.size(); i++) {
        const double p = ln_p[i], q = ln_q[i], m = std::log(0.5 * (std::exp(p) + std::exp(q)));
        sum += kind == PYFLY_GATE_FUZZY_KL          ? kl(q, p)
               : kind == PYFLY_GATE_FUZZY_KL_TARGET ? kl(p, q)
               : kind == PYFLY_GATE_FUZZY_JS        ? 0.5 * (kl(p, m) + kl(q, m))
               : kind == PYFLY_GATE_FUZZY_JS_CODE   ? 0.5 * (kl(m, p) + kl(m, q))
                                                    : 0.5 * std::fabs(std::exp(p) - std::exp(q));
    }
    return sum;
}

// Just above its divergence a position passes, just below it does not.
void test_divergences() {
    const pyfly_window_config at_once = {0, PYFLY_WINDOW_AGREE, -1, 0};
    for (const size_t n : {2, 15, 16, 17, 300, 1023, 1024, 1025, 4099, 9000}) {
        for (int32_t repeat = 0; repeat < 12; repeat++) {
            std::vector<float> p = random_row(n), q = p;
            for (float & logit : p) {
                logit *= repeat % 2 == 0 ? 1.0f : 5.0f; // half of them are decided by a few tokens
            }
            std::normal_distribution<float> noise(0.0f, std::exp2f(static_cast<float>(random_int(-9, 3))));
            for (size_t i = 0; i < n; i++) {
                p[i] = repeat % 3 == 0 || p[i] > -inf ? p[i] : -60.0f; // a third of them forbids tokens
                q[i] = repeat % 4 == 0 ? p[i] + noise(rng) : std::max(p[i], -99.0f) + noise(rng) + 9.0f;
            }
            const int32_t draft = random_int(0, static_cast<int32_t>(n) - 1);
            // What is forbidden, or as good as impossible, is refused by every gate.
            if (*std::max_element(p.begin(), p.end()) - p[static_cast<size_t>(draft)] > 22.0f) {
                continue;
            }
            const int32_t choices[2] = {(draft + 1) % static_cast<int32_t>(n), 0};
            std::vector<float> logits = p;
            logits.insert(logits.end(), p.begin(), p.end());
            for (int32_t kind = PYFLY_GATE_FUZZY_KL; kind <= PYFLY_GATE_FUZZY_TV; kind++) {
                const auto passes = [&](double threshold) {
                    const pyfly_gate_node gate = {kind, 0, threshold, 0.0};
                    pyfly_decision decision;
                    int32_t tokens[2];
                    size_t n_tokens = 0;
                    assert(pyfly_verify(logits.data(), n, &draft, 1, q.data(), choices, &gate, 1, &at_once, nullptr, 0,
                                        nullptr, 0, nullptr, 0, 0, &decision, tokens, &n_tokens, &error) == PYFLY_OK);
                    return decision.reason == PYFLY_REASON_LOOSE;
                };
                const double value = reference_divergence(kind, p, q), slack = std::max(1e-5 * value, 2e-8);
                assert(std::isinf(value) ? !passes(1e300) : passes(value + slack));
                assert(std::isinf(value) || value < slack || !passes(value - slack));
            }
        }
    }
}

void test_bad_arguments() {
    const float row[2] = {0.0f, 1.0f};
    const int32_t draft[1] = {5};
    const pyfly_gate_node exact = {PYFLY_GATE_EXACT, 0, 0.0, 0.0}, wrong = {PYFLY_GATE_MARGIN, 0, -1.0, 0.0},
                          open = {PYFLY_GATE_ALL, 2, 0.0, 0.0};
    const pyfly_window_config window = {6, PYFLY_WINDOW_AGREE, -1, 0}, bad_window = {-1, PYFLY_WINDOW_AGREE, -1, 0};
    pyfly_decision decisions[1];
    int32_t tokens[2];
    size_t n_tokens = 0;
    const auto status = [&](const int32_t * d, const pyfly_gate_node * g, const pyfly_window_config * w) {
        error.message[0] = '\0';
        const pyfly_status s = pyfly_verify(row, 2, d, 0, nullptr, nullptr, g, 1, w, d, d ? 1 : 0, nullptr, 0, nullptr,
                                            0, 0, decisions, tokens, &n_tokens, &error);
        assert((s == PYFLY_OK) == (error.message[0] == '\0'));
        return s;
    };
    assert(status(nullptr, &exact, &window) == PYFLY_OK && n_tokens == 1 && tokens[0] == 1);
    assert(status(draft, &exact, &window) == PYFLY_STATUS_INVALID); // a protected token outside the vocabulary
    assert(status(nullptr, &wrong, &window) == PYFLY_STATUS_INVALID);
    assert(status(nullptr, &open, &window) == PYFLY_STATUS_INVALID);
    assert(status(nullptr, &exact, &bad_window) == PYFLY_STATUS_INVALID);
    pyfly_target * target = nullptr;
    const pyfly_scripted_config empty = {0, 1, 1, 1, 1, -1, 1, nullptr};
    assert(pyfly_target_scripted_new(&empty, scripted_row, nullptr, &target, &error) == PYFLY_STATUS_INVALID);
    pyfly_drafter * drafter = nullptr;
    const int32_t no_token = -2;
    const auto lookup_status = [&](const pyfly_lookup_config & lookup, size_t n_texts) {
        return pyfly_drafter_lookup_new(nullptr, &lookup, &no_token, n_texts, nullptr, 0, &drafter, &error);
    };
    assert(lookup_status({0, 1, 1, 0, 0}, 0) == PYFLY_STATUS_INVALID);
    assert(lookup_status({4, 1, 1, 0, PYFLY_MAX_LOOKUP + 1}, 0) == PYFLY_STATUS_INVALID);
    assert(lookup_status({4, 1, 1, 0, 0}, 1) == PYFLY_STATUS_INVALID);
    assert(pyfly_drafter_callback_new(nullptr, nullptr, 0, &drafter, &error) == PYFLY_STATUS_INVALID);
}

// Every token that comes out can be drawn, whatever the rows forbid; accepted ones are the drafts.
void test_speculative_sampling() {
    for (int32_t trial = 0; trial < 300; trial++) {
        const size_t n_vocab = static_cast<size_t>(random_int(1, 40)), n_draft = static_cast<size_t>(random_int(0, 8));
        std::vector<float> logits, draft_logits;
        std::vector<int32_t> draft;
        for (size_t i = 0; i <= n_draft; i++) {
            const std::vector<float> row = random_row(n_vocab), draft_row = random_row(n_vocab);
            logits.insert(logits.end(), row.begin(), row.end());
            if (i < n_draft) {
                draft_logits.insert(draft_logits.end(), draft_row.begin(), draft_row.end());
                int32_t token = random_int(0, static_cast<int32_t>(n_vocab) - 1);
                while (draft_row[static_cast<size_t>(token)] == -inf) {
                    token = (token + 1) % static_cast<int32_t>(n_vocab);
                }
                draft.push_back(token);
            }
        }
        const pyfly_gate_node gate = {PYFLY_GATE_STOCHASTIC, trial % 3, 0.0, 0.0};
        const pyfly_window_config window = {0, PYFLY_WINDOW_AGREE, -1, 0};
        std::vector<pyfly_decision> decisions(n_draft + 1);
        std::vector<int32_t> tokens(n_draft + 1);
        size_t n_tokens = 0;
        assert(pyfly_verify(logits.data(), n_vocab, draft.data(), n_draft, trial % 2 ? draft_logits.data() : nullptr,
                            nullptr, &gate, 1, &window, nullptr, 0, nullptr, 0, nullptr, 0,
                            static_cast<uint64_t>(trial), decisions.data(), tokens.data(), &n_tokens,
                            &error) == PYFLY_OK);
        assert(n_tokens >= 1 && n_tokens <= n_draft + 1);
        for (size_t i = 0; i < n_tokens; i++) {
            assert(logits[i * n_vocab + static_cast<size_t>(tokens[i])] != -inf);
            assert(i + 1 == n_tokens || tokens[i] == draft[i]);
        }
    }
}

} // namespace

int main() {
    test_rows();
    test_divergences();
    test_lookup();
    test_threads();
    test_bad_arguments();
    test_speculative_sampling();
    std::printf("core: ok (%s)\n", pyfly_simd_level());
    return 0;
}
