#include "head.h"

#include <algorithm>

#include "error.h"

namespace pyfly {

namespace {

constexpr size_t n_rows_kept = 64;   // so far back a window across steps may break and drafting go on at once
constexpr size_t n_rows_most = 192;  // more are cut back to that
constexpr size_t n_rows_chunk = 128; // of a long batch at a time

} // namespace

// A head's memory is a KV cache, also where the target's holds recurrent states.
HeadDrafter::HeadDrafter(Parts parts, double p_min)
    : model_(std::move(parts.model)), context_(std::move(parts.context)), shape_(parts.shape),
      p_min_(require_p_min(p_min)),
      own_(context_.get(), parts.threads, shape_.name, false, shape_.input_width, /*inputs_replace=*/shape_.lag == 0),
      memories_(own_, shape_.first_entry), seen_(static_cast<size_t>(memories_.n()), SeenTokens(shape_.row_width)) {}

// Whether the rows are there for the entries of a request before `end` that are not in the cache.
bool HeadDrafter::has_rows_for(int32_t slot, size_t end) const {
    const size_t next = next_entry(slot);
    return next >= end || seen(slot).has_row_before(next + 1 - shape_.lag);
}

// Forgets all entries of a request; the next one will be the first that there is a row for.
void HeadDrafter::restart_at_rows(int32_t slot) {
    const size_t rows_begin = seen(slot).rows_begin();
    memories_.clear(slot, std::max(shape_.first_entry, rows_begin > 0 ? rows_begin + shape_.lag : 0));
}

void HeadDrafter::observe(Model & target, const std::vector<Span> & spans, const std::vector<bool> & wanted) {
    for (size_t s = 0; s < spans.size(); s++) {
        const Span & span = spans[s];
        SeenTokens & seen = this->seen(span.sequence);
        seen.cut(span.n_past);
        if (!wanted[s]) {
            continue; // should it draft one day, it begins behind the gap
        }
        if (seen.end() != span.n_past) {
            seen.restart(span.n_past);
            restart_at_rows(span.sequence);
        }
        if (span.may_return) {
            const Checkpoints * all = target.checkpoints(span.sequence);
            seen.mark([&](size_t n) { return all != nullptr && all->has(static_cast<int32_t>(n)); });
        }
        for (size_t i = 0; i < span.n; i += n_rows_chunk) {
            const size_t n_chunk = std::min(n_rows_chunk, span.n - i);
            read_rows(s, i, n_chunk, seen.append(span.tokens + i, n_chunk));
            trim_rows(span.sequence);
        }
    }
}

// Drops rows that are far back, evaluating the entries first that need them.
void HeadDrafter::trim_rows(int32_t slot) {
    SeenTokens & seen = this->seen(slot);
    if (seen.end() - seen.rows_begin() <= n_rows_most) {
        return;
    }
    memories_.follow(slot, seen.tokens().data(), seen.tokens().size(), seen.begin());
    if (!has_rows_for(slot, seen.end())) {
        restart_at_rows(slot);
    }
    if (seen.end() > next_entry(slot) + n_rows_kept) {
        make_room({slot}, seen.end() - next_entry(slot));
        catch_up({{slot, seen.tokens(), seen.begin(), seen.end()}});
    }
    seen.drop_rows(std::min(seen.end() - n_rows_kept, next_entry(slot) - shape_.lag));
}

// The first entry that has to be evaluated again (that of the last token always is, with the draft) takes the row of
// the token before it, which may be gone.
size_t HeadDrafter::n_reusable(int32_t slot, const std::vector<int32_t> & history, size_t n) const {
    const SeenTokens & seen = this->seen(slot);
    const std::vector<int32_t> & tokens = seen.tokens();
    const size_t n_seen = n_staying(seen.begin(), tokens.data(), tokens.size(), history.data(), n);
    const size_t n_entries = memories_.n_staying(slot, history.data(), std::min(n + 1, history.size() - 1));
    const size_t next = memories_.begin(slot) + n_entries;
    const bool is_behind = n_entries > 0 && seen.begin() + n_seen == n && next < n + shape_.lag;
    return is_behind && !seen.will_have_row_before(next + 1 - shape_.lag) ? next - shape_.lag : n;
}

// Forgets what does not belong to `history`. Returns whether a draft can start from it.
bool HeadDrafter::sync(int32_t slot, const std::vector<int32_t> & history) {
    const size_t last = history.size() - 1;
    seen(slot).follow(history.data(), last);
    memories_.follow(slot, history.data(), last);
    if (last == 0 || seen(slot).end() != last) {
        return false;
    }
    if (!has_rows_for(slot, last + shape_.lag)) {
        if (!seen(slot).has_row_before(last)) {
            return false;
        }
        restart_at_rows(slot);
    }
    return true;
}

// Requests for which the cache has no room start again with what there are rows for.
void HeadDrafter::make_room(const std::vector<int32_t> & slots, size_t n_new) {
    if (!memories_.make_room(slots, n_new)) {
        for (const int32_t slot : slots) {
            restart_at_rows(slot);
        }
    }
}

void HeadDrafter::gather_inputs(const std::vector<Wanted> & wanted) {
    rows_.clear();
    for (const Wanted & one : wanted) {
        const size_t n_without = one.entry < shape_.lag ? 1 : 0; // nothing comes before the first token of a request
        if (one.n > n_without) {
            const float * rows = seen(one.slot).row(one.entry + n_without - shape_.lag);
            rows_.insert(rows_.end(), rows, rows + (one.n - n_without) * shape_.row_width);
        }
    }
    const size_t n_rows = rows_.size() / shape_.row_width;
    inputs_.resize(n_rows * shape_.input_width);
    if (n_rows > 0) {
        make_inputs(rows_.data(), n_rows, inputs_.data());
    }
    const float * from = inputs_.data();
    for (const Wanted & one : wanted) {
        const size_t n_without = one.entry < shape_.lag ? shape_.input_width : 0;
        std::fill_n(one.out, n_without, 0.0f);
        const size_t n = one.n * shape_.input_width - n_without;
        std::copy_n(from, n, one.out + n_without);
        from += n;
    }
}

void HeadDrafter::catch_up(const std::vector<Goal> & goals) {
    std::vector<SlotMemories::Part> parts;
    std::vector<std::vector<float>> inputs(goals.size());
    std::vector<Wanted> wanted;
    const auto forget = [&] { // the next head's layer takes the same cells
        for (const Wanted & one : wanted) {
            keep_entries(one.slot, one.entry);
        }
    };
    while (true) {
        parts.clear();
        wanted.clear();
        for (size_t i = 0; i < goals.size(); i++) {
            const Goal & goal = goals[i];
            const size_t entry = next_entry(goal.slot);
            if (entry < goal.end) {
                const size_t n = std::min(goal.end - entry, static_cast<size_t>(own_.n_batch()));
                inputs[i].resize(n * shape_.input_width);
                wanted.push_back({goal.slot, entry, n, inputs[i].data()});
                parts.push_back({goal.slot, goal.tokens.data() + (entry - goal.offset), n, n, inputs[i].data()});
            }
        }
        if (parts.empty()) {
            return;
        }
        gather_inputs(wanted);
        try {
            for (int32_t head = 0; head < shape_.n_heads; head++) {
                if (head > 0) {
                    forget();
                }
                select(head);
                evaluate(parts, [](size_t, size_t) {});
            }
        } catch (...) {
            forget();
            throw;
        }
    }
}

void HeadDrafter::forget(int32_t slot) {
    memories_.clear(slot);
    seen(slot).restart(0);
}

void HeadDrafter::evaluate(const std::vector<SlotMemories::Part> & parts,
                           const std::function<void(size_t part, size_t span)> & read) {
    memories_.evaluate(parts, [&](size_t part, size_t span) {
        n_evaluated_ += static_cast<int64_t>(parts[part].n);
        read(part, span);
    });
}

void HeadDrafter::propose(const std::vector<DraftRequest> & requests) {
    std::vector<Job> jobs;
    std::vector<int32_t> slots;
    size_t n_new = 0;
    for (const DraftRequest & request : requests) {
        if (sync(request.slot, *request.history)) {
            const int32_t n_max = std::min(request.n_max, draft_most());
            jobs.push_back({request.slot, *request.history, request.out, static_cast<size_t>(n_max), request.wants_rows,
                            request.draw, request.stop});
            slots.push_back(request.slot);
            n_new += jobs.back().last() - next_entry(request.slot);
        }
    }
    if (jobs.empty()) {
        return;
    }
    make_room(slots, n_new + n_cells(jobs));
    draft(jobs);
    for (Job & job : jobs) {
        job.out->tokens = std::move(job.drafted);
    }
}

} // namespace pyfly
