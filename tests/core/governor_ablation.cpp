// What each rate and mechanism of the governor is worth: the governor in simulated worlds, with one of them changed at
// a time. Not a test; see docs/governor.md for its table.
//
//     cmake -S . -B build/core -DPYFLY_CORE_ONLY=ON && cmake --build build/core --target pyfly_governor_ablation
//     build/core/pyfly_governor_ablation [rows | choose]     rows: every row; choose: the time of a choice

#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <utility>

#include "governor.h"
#include "governor_worlds.h"

namespace {

using namespace worlds;
using pyfly::Governor;
using pyfly::MeasuredCosts;

// How well the costs are known beforehand.
enum class Known { yes, no, wrong };

struct Kind {
    std::string name;
    double level;
};

// One machine and one set of drafters: the best fixed K is the best of all its kinds of text together.
struct Row {
    Machine machine;
    std::string drafters_name;
    Drafters drafters;
    size_t n_slots, length;
    double best_of_row[2];           // [0]: over plain, of the best fixed K; [1]: that K
    std::vector<double> plain, best; // [kind] speeds: plain, and of the best fixed K of the kind
    std::vector<double> fixed;       // [kind] of the best fixed K of the row
};

std::vector<Machine> machines() {
    return {
        {"Xeon F16",
         [](int32_t n) {
             const double first[] = {1000, 1000, 1130, 1160, 1180};
             return n <= 4 ? first[n] : 1180.0 + 990.0 * ((n - 1) / 4);
         },
         410.0, 0.15, 0.3, 200.0},
        {"Zen 4 F16", through({{1, 1}, {4, 1.42}, {8, 2.0}, {16, 3.1}, {64, 9}}), 300.0, 0.15, 0.3, 150.0},
        {"Zen 4 F16, dear pair",
         [](int32_t n) { return n == 1 ? 780.0 : 1050.0 + 100.0 * n + 15.0 * std::max(n - 4, 0); }, 270.0, 0.15, 0.3,
         150.0},
        {"Zen 4 Q4_K_M", through({{1, 1}, {4, 2.45}, {8, 4.9}, {9, 4.9}, {16, 5.6}, {64, 18}}), 400.0, 0.15, 0.3,
         250.0},
        {"steep", [](int32_t n) { return 1000.0 * (1.0 + 0.4 * (n - 1) + (n > 8 ? 1.0 : 0.0)); }, 300.0, 0.3, 0.3,
         150.0},
        {"memory", [](int32_t n) { return 1000.0 * (1.0 + 0.1 * (n - 1)); }, 100.0, 0.05, 0.3, 20.0},
        {"flat", [](int32_t n) { return 1000.0 * (1.0 + 0.01 * n + 0.03 * std::max(n - 32, 0)); }, 200.0, 0.01, 0.3,
         5.0},
    };
}

const std::vector<Kind> & kinds() {
    static const std::vector<Kind> all = {{"constant", 0.03}, {"constant", 0.3},  {"constant", 0.6},
                                          {"constant", 0.8},  {"constant", 0.95}, {"stretches", 0.3},
                                          {"change", 0.92},   {"mixture", 0.5},   {"deeper", 0.85}};
    return all;
}

const std::vector<Text> & texts_in(const Row & row, size_t kind) {
    static std::map<std::array<size_t, 3>, std::vector<Text>> made;
    const size_t n_texts = (row.length == 64 ? 16 : 8) * std::max<size_t>(row.n_slots / 2, 1);
    auto & texts = made[{kind, row.length, n_texts}];
    if (texts.empty()) {
        texts = texts_of(kinds()[kind].name, kinds()[kind].level, n_texts, row.length,
                         static_cast<uint32_t>(100 * kind + row.length + n_texts));
    }
    return texts;
}

std::vector<Row> make_rows() {
    std::vector<Row> rows;
    for (const Machine & machine : machines()) {
        for (const auto & [name, drafters] :
             std::vector<std::pair<std::string, Drafters>>{{"lookup", {true, false, false}},
                                                           {"draft", {false, true, false}},
                                                           {"both", {true, true, false}},
                                                           {"head", {false, true, true}}}) {
            for (const auto & [n_slots, length] :
                 std::vector<std::pair<size_t, size_t>>{{1, 64}, {1, 200}, {2, 64}, {4, 200}, {8, 64}}) {
                Row row = {machine, name, drafters, n_slots, length, {}, {}, {}, {}};
                if (drafters.is_head) {
                    row.machine.draft = 120.0;
                }
                std::vector<std::vector<double>> speeds;
                for (const int32_t k : {0, 1, 2, 3, 4, 6, 8, 10}) {
                    auto & of_k = speeds.emplace_back();
                    for (size_t kind = 0; kind < kinds().size(); kind++) {
                        Fixed fixed(k);
                        of_k.push_back(decode(row.machine, drafters, texts_in(row, kind), n_slots, fixed).speed());
                    }
                    double over_plain = 0.0;
                    for (size_t kind = 0; kind < kinds().size(); kind++) {
                        over_plain += std::log(of_k[kind] / speeds[0][kind]) / static_cast<double>(kinds().size());
                    }
                    if (k == 0 || over_plain > std::log(row.best_of_row[0])) {
                        row.best_of_row[0] = std::exp(over_plain);
                        row.best_of_row[1] = k;
                        row.fixed = of_k;
                    }
                }
                row.plain = speeds[0];
                for (size_t kind = 0; kind < kinds().size(); kind++) {
                    double best = 0.0;
                    for (const auto & of_k : speeds) {
                        best = std::max(best, of_k[kind]);
                    }
                    row.best.push_back(best);
                }
                rows.push_back(std::move(row));
            }
        }
    }
    return rows;
}

// Another seed of the noise, to see what a difference is worth.
uint32_t noise_seed = 7;

MeasuredCosts measure(const Row & row, Known known, uint32_t seed) {
    std::mt19937 rng(seed);
    std::normal_distribution<double> normal(1.0, 0.02);
    MeasuredCosts costs;
    for (const int32_t n : {1, 2, 3, 4, 6, 8, 12, 16, 32, 64}) {
        const double wrong = known != Known::wrong ? 1.0 : n == 1 ? 1.25 * 1.4 : 1.4;
        costs.target.push_back({n, wrong * row.machine.target(n) * normal(rng)});
    }
    if (row.drafters.model) {
        const int32_t model = row.drafters.lookup ? 1 : 0;
        const double wrong = known == Known::wrong ? 0.7 : 1.0;
        for (const int32_t k : {1, 4}) {
            for (const int32_t n_texts : {1, 4}) {
                const std::vector<int32_t> asked(static_cast<size_t>(n_texts), k);
                costs.drafts.push_back({model, n_texts, k, wrong * row.machine.drafting(asked) * normal(rng)});
            }
        }
        if (!row.drafters.is_head) {
            costs.catch_up.push_back({model, row.machine.catch_up * normal(rng)});
        }
    }
    return costs;
}

struct Score {
    double of_best = 0.0;   // geometric mean over the best fixed K of each world
    double of_row = 0.0;    // over the best fixed K of its row
    double worst_row = 9.0; // the least of a row's mean over its best fixed K
    double worst = 9.0;     // the least over plain decoding
    int32_t n_below = 0;    // worlds under 0.97 of plain decoding
    int32_t n_worlds = 0;
};

Score score(const std::vector<Row> & rows, const Governor::Settings & settings, Known known, bool print) {
    Score total;
    for (size_t i = 0; i < rows.size(); i++) {
        const Row & row = rows[i];
        double of_row = 0.0, worst = 9.0, gain = 0.0;
        std::string cells;
        for (size_t kind = 0; kind < kinds().size(); kind++) {
            Governor governor(settings);
            const int32_t n_drafters = row.drafters.lookup + row.drafters.model;
            for (int32_t d = 0; d < n_drafters; d++) {
                const bool is_free = d == 0 && row.drafters.lookup;
                governor.expect(d, is_free, is_free ? 0.0 : row.machine.draft / row.machine.target(1));
            }
            if (known != Known::no) {
                governor.expect_costs(measure(row, known, static_cast<uint32_t>(i)));
            }
            const double v =
                decode(row.machine, row.drafters, texts_in(row, kind), row.n_slots, governor, 0.04, noise_seed).speed();
            const double over_plain = v / row.plain[kind];
            total.of_best += std::log(v / row.best[kind]);
            of_row += std::log(v / row.fixed[kind]);
            gain += std::log(over_plain);
            worst = std::min(worst, over_plain);
            total.n_below += over_plain < 0.97;
            total.n_worlds++;
            char cell[40];
            std::snprintf(cell, sizeof cell, " %.2f/%.2f", over_plain, row.best[kind] / row.plain[kind]);
            cells += cell;
        }
        const double n = static_cast<double>(kinds().size());
        total.of_row += of_row;
        total.worst_row = std::min(total.worst_row, std::exp(of_row / n));
        total.worst = std::min(total.worst, worst);
        if (print) {
            std::printf("%-22s %-6s %zu x %-3zu  mean %.3f  K=%-2.0f %.3f  |%s\n", row.machine.name.c_str(),
                        row.drafters_name.c_str(), row.n_slots, row.length, std::exp(gain / n), row.best_of_row[1],
                        row.best_of_row[0], cells.c_str());
        }
    }
    total.of_best = std::exp(total.of_best / total.n_worlds);
    total.of_row = std::exp(total.of_row / total.n_worlds);
    return total;
}

using Change = std::function<void(Governor::Settings &)>;

// Of a rate: off, or half and double.
const std::vector<std::pair<const char *, Change>> & changes() {
    static const std::vector<std::pair<const char *, Change>> all = {
        {"as it is", [](auto &) {}},
        {"other noise", [](auto &) { noise_seed = 8; }},
        {"other noise", [](auto &) { noise_seed = 9; }},
        {"hysteresis off", [](auto & s) { s.hysteresis = 1.0; }},
        {"hysteresis 1.04", [](auto & s) { s.hysteresis = 1.04; }},
        {"trials off", [](auto & s) { s.spent = s.credit = 0.0; }},
        {"spent / 2", [](auto & s) { s.spent /= 2; }},
        {"spent * 2", [](auto & s) { s.spent *= 2; }},
        {"credit / 2", [](auto & s) { s.credit /= 2; }},
        {"credit * 2", [](auto & s) { s.credit *= 2; }},
        {"trial 1", [](auto & s) { s.trial = 1; }},
        {"trial 4", [](auto & s) { s.trial = 4; }},
        {"catching up off", [](auto & s) { s.stay = 1e9; }},
        {"stay / 2", [](auto & s) { s.stay /= 2; }},
        {"stay * 2", [](auto & s) { s.stay *= 2; }},
        {"length always", [](auto & s) { s.length = 1e9; }},
        {"length / 4", [](auto & s) { s.length /= 4; }},
        {"length / 2", [](auto & s) { s.length /= 2; }},
        {"length * 2", [](auto & s) { s.length *= 2; }},
        {"length * 4", [](auto & s) { s.length *= 4; }},
        {"beside 1", [](auto & s) { s.beside = 1.0; }},
        {"beside 2", [](auto & s) { s.beside = 2.0; }},
        {"beside 4", [](auto & s) { s.beside = 4.0; }},
        {"hope 1", [](auto & s) { s.hope = 1.0; }},
        {"hope 0.9", [](auto & s) { s.hope = 0.9; }},
        {"plain_every off", [](auto & s) { s.plain_every = 1 << 30; }},
        {"plain_every / 2", [](auto & s) { s.plain_every /= 2; }},
        {"plain_every * 2", [](auto & s) { s.plain_every *= 2; }},
        {"prior_slope / 2", [](auto & s) { s.prior_slope /= 2; }},
        {"prior_slope * 2", [](auto & s) { s.prior_slope *= 2; }},
        {"costs.all off", [](auto & s) { s.costs.all = 0; }},
        {"costs.all / 2", [](auto & s) { s.costs.all /= 2; }},
        {"costs.all * 2", [](auto & s) { s.costs.all *= 2; }},
        {"costs.own / 2", [](auto & s) { s.costs.own /= 2; }},
        {"costs.own * 2", [](auto & s) { s.costs.own *= 2; }},
        {"costs.most off", [](auto & s) { s.costs.most = 1e9; }},
        {"costs.most 1.12", [](auto & s) { s.costs.most = 1.12; }},
        {"costs.most 1.5", [](auto & s) { s.costs.most = 1.5; }},
        {"a text of its own off", [](auto & s) { s.acceptance.weight_of_all = 1e9; }},
        {"memory 0.75", [](auto & s) { s.acceptance.memory = 0.75; }},
        {"memory 0.95", [](auto & s) { s.acceptance.memory = 0.95; }},
        {"memory 1", [](auto & s) { s.acceptance.memory = 1.0; }},
        {"memory_of_all 0.96", [](auto & s) { s.acceptance.memory_of_all = 0.96; }},
        {"memory_of_all 0.99", [](auto & s) { s.acceptance.memory_of_all = 0.99; }},
        {"weight_of_all 1", [](auto & s) { s.acceptance.weight_of_all = 1.0; }},
        {"weight_of_all / 2", [](auto & s) { s.acceptance.weight_of_all /= 2.0; }},
        {"weight_of_all * 2", [](auto & s) { s.acceptance.weight_of_all *= 2.0; }},
        {"first 0.5", [](auto & s) { s.acceptance.first = 0.5; }},
        {"first 0.85", [](auto & s) { s.acceptance.first = 0.85; }},
        {"inherit 0", [](auto & s) { s.acceptance.inherit = 0.0; }},
        {"inherit 1", [](auto & s) { s.acceptance.inherit = 1.0; }},
    };
    return all;
}

void time_a_choice() {
    Governor governor;
    for (int32_t d = 0; d < 3; d++) {
        governor.expect(d, d == 0, 0.2);
    }
    governor.expect_costs({{{1, 1000.0}, {16, 2000.0}, {64, 6000.0}, {256, 20000.0}}, {}, {}});
    for (const int32_t n : {1, 8, 16}) {
        std::vector<Candidate> candidates;
        for (int32_t text = 0; text < n; text++) {
            candidates.push_back({text, {{0, 16, 0, 0}, {1, 16, 0, 0}, {2, 16, 0, 0}}});
        }
        double fastest = 1e9; // of several: other work on the machine makes some slow
        for (int32_t batch = 0; batch < 20; batch++) {
            constexpr int32_t n_times = 100;
            const auto start = std::chrono::steady_clock::now();
            for (int32_t i = 0; i < n_times; i++) {
                governor.choose(candidates);
            }
            const std::chrono::duration<double, std::micro> us = std::chrono::steady_clock::now() - start;
            fastest = std::min(fastest, us.count() / n_times);
        }
        std::printf("%d texts, 3 drafters, 16 deep: %.1f us\n", n, fastest);
    }
}

} // namespace

int main(int argc, char ** argv) {
    if (argc > 1 && std::strcmp(argv[1], "choose") == 0) {
        time_a_choice();
        return 0;
    }
    const std::vector<Row> rows = make_rows();
    if (argc > 1 && std::strcmp(argv[1], "rows") == 0) {
        score(rows, {}, Known::yes, true);
    }
    std::printf("| change | costs | of each world's best K | of its row's best K | worst row | worst over plain | "
                "under 0.97 |\n| --- | --- | --- | --- | --- | --- | --- |\n");
    const auto print = [&](const char * name, const Change & change, Known known) {
        Governor::Settings settings;
        noise_seed = 7;
        change(settings);
        const Score s = score(rows, settings, known, false);
        const char * names[] = {"known", "unknown", "wrong"};
        std::printf("| %s | %s | %.4f | %.4f | %.3f | %.3f | %d of %d |\n", name, names[static_cast<int>(known)],
                    s.of_best, s.of_row, s.worst_row, s.worst, s.n_below, s.n_worlds);
        std::fflush(stdout);
    };
    for (const auto & [name, change] : changes()) {
        if (argc > 1 && std::strcmp(argv[1], "rows") == 0 && &change != &changes()[0].second) {
            break;
        }
        for (const Known known : {Known::yes, Known::no, Known::wrong}) {
            print(name, change, known);
        }
    }
    return 0;
}
