#include "checkpoints.h"

#include <algorithm>
#include <set>

namespace pyfly {

namespace {

constexpr size_t always = 4; // kept, however large: two turns of two sequences

struct Candidate {
    size_t sequence = 0;
    int32_t n = 0, saves = 0;
};

size_t bytes_of(const std::vector<Checkpoints *> & sequences, size_t & n_kept) {
    std::set<const std::vector<uint8_t> *> states;
    n_kept = 0;
    for (const Checkpoints * sequence : sequences) {
        for (const auto & checkpoint : sequence->all()) {
            if (checkpoint.is_kept && states.insert(checkpoint.state.get()).second) {
                n_kept++;
            }
        }
    }
    size_t n = 0;
    for (const auto * state : states) {
        n += state->size();
    }
    return n;
}

// The kept state of a sequence that saves least.
Candidate cheapest(const Checkpoints & of, size_t sequence, int32_t n_spared) {
    Candidate least;
    int32_t before = 0;
    for (const auto & checkpoint : of.all()) {
        if (!checkpoint.is_kept) {
            continue;
        }
        const int32_t saves = checkpoint.n - before;
        if (checkpoint.n != n_spared && (least.n == 0 || saves < least.saves)) {
            least = {sequence, checkpoint.n, saves};
        }
        before = checkpoint.n;
    }
    return least;
}

} // namespace

const Checkpoints::Checkpoint * Checkpoints::longest(int32_t n) const {
    const auto behind =
        std::upper_bound(all_.begin(), all_.end(), n, [](int32_t at, const Checkpoint & c) { return at < c.n; });
    return behind == all_.begin() ? nullptr : &*(behind - 1);
}

int32_t Checkpoints::n_kept(int32_t n) const {
    int32_t longest = 0;
    for (const Checkpoint & checkpoint : all_) {
        longest = checkpoint.is_kept && checkpoint.n <= n ? checkpoint.n : longest;
    }
    return longest;
}

std::shared_ptr<std::vector<uint8_t>> Checkpoints::take_buffer() {
    const auto last = std::find_if(all_.begin(), all_.end(), [](const Checkpoint & c) { return !c.is_kept; });
    State state = last == all_.end() ? nullptr : std::move(last->state);
    if (last != all_.end()) {
        all_.erase(last);
    }
    const bool is_own = state != nullptr && state.use_count() == 1;
    return is_own ? std::const_pointer_cast<std::vector<uint8_t>>(state) : std::make_shared<std::vector<uint8_t>>();
}

void Checkpoints::add(int32_t n, State state, bool is_kept) {
    const auto goes = [n](const Checkpoint & c) { return !c.is_kept || c.n == n; };
    all_.erase(std::remove_if(all_.begin(), all_.end(), goes), all_.end());
    const auto behind = std::find_if(all_.begin(), all_.end(), [n](const Checkpoint & c) { return c.n > n; });
    all_.insert(behind, {n, std::move(state), is_kept});
}

void Checkpoints::share(const Checkpoints & from, int32_t n) {
    for (const Checkpoint & checkpoint : from.all()) {
        if (checkpoint.is_kept && checkpoint.n <= n) {
            add(checkpoint.n, checkpoint.state, true);
        }
    }
}

bool Checkpoints::has(int32_t n) const {
    const Checkpoint * checkpoint = longest(n);
    return checkpoint != nullptr && checkpoint->n == n;
}

void Checkpoints::keep(int32_t n) {
    for (Checkpoint & checkpoint : all_) {
        checkpoint.is_kept = checkpoint.is_kept || checkpoint.n == n;
    }
}

void Checkpoints::forget_behind(int32_t n) {
    while (!all_.empty() && all_.back().n > n) {
        all_.pop_back();
    }
}

void Checkpoints::drop(int32_t n) {
    all_.erase(std::remove_if(all_.begin(), all_.end(), [n](const Checkpoint & c) { return c.n == n; }), all_.end());
}

void bound(const std::vector<Checkpoints *> & sequences, size_t last, int32_t n_last, size_t n_most,
           size_t most_bytes) {
    const auto n_of = [](const Checkpoints & of) {
        return static_cast<size_t>(
            std::count_if(of.all().begin(), of.all().end(), [](const auto & c) { return c.is_kept; }));
    };
    while (n_of(*sequences[last]) > n_most) {
        sequences[last]->drop(cheapest(*sequences[last], last, n_last).n);
    }
    size_t n_kept = 0;
    while (bytes_of(sequences, n_kept) > most_bytes && n_kept > always) {
        Candidate least;
        for (size_t i = 0; i < sequences.size(); i++) {
            const Candidate own = cheapest(*sequences[i], i, i == last ? n_last : 0);
            least = own.n > 0 && (least.n == 0 || own.saves < least.saves) ? own : least;
        }
        if (least.n == 0) {
            return;
        }
        sequences[least.sequence]->drop(least.n);
    }
}

} // namespace pyfly
