#include "head.h"

#include <algorithm>

#include "error.h"
#include "llama/llama_ext.h"

namespace pyfly {

namespace {

constexpr size_t n_rows_kept = 64;   // so far back a window across rounds may break and drafting go on at once
constexpr size_t n_rows_most = 192;  // more are cut back to that
constexpr size_t n_rows_chunk = 128; // of a long batch at a time
constexpr size_t n_merged = 16;      // most entries that are evaluated together with a draft's first step

} // namespace

// A head's memory is a KV cache, also where the target's holds recurrent states.
HeadDrafter::HeadDrafter(Parts parts, double p_min)
    : model_(std::move(parts.model)), context_(std::move(parts.context)), shape_(parts.shape),
      p_min_(require_p_min(p_min)), own_(context_.get(), parts.threads, shape_.name, false, shape_.input_width),
      memories_(own_), texts_(static_cast<size_t>(memories_.n()), {SeenText(shape_.row_width), shape_.first_entry}) {
    llama_set_embeddings_nextn(context_.get(), true, /*masked=*/true);
}

// Forgets all entries of a text; the next one will be `entry`.
void HeadDrafter::restart(int32_t text, size_t entry) {
    memories_.at(text).clear();
    at(text).begin = entry;
}

// Forgets all entries of a text; the next one will be the first that there is a row for.
void HeadDrafter::restart_at_rows(int32_t text) {
    restart(text, std::max(shape_.first_entry, at(text).seen.rows_begin() + 1));
}

// Keeps the entries of a text that are of `tokens`, which begin at position `offset`, and before `end`.
void HeadDrafter::cut_entries(int32_t text, const std::vector<int32_t> & tokens, size_t offset, size_t end) {
    const size_t begin = at(text).begin;
    Memory & memory = memories_.at(text);
    memory.truncate(begin < end ? memory.n_common(tokens.data() + (begin - offset), end - begin) : 0);
}

void HeadDrafter::observe(Model &, const std::vector<Span> & spans, const std::vector<bool> & wanted) {
    for (size_t s = 0; s < spans.size(); s++) {
        if (!wanted[s]) {
            continue; // should it draft one day, it begins behind the gap
        }
        const Span & span = spans[s];
        SeenText & seen = at(span.sequence).seen;
        if (span.n_past < seen.begin() || span.n_past > seen.end()) {
            seen.restart(span.n_past);
            restart(span.sequence, std::max(shape_.first_entry, span.n_past > 0 ? span.n_past + 1 : 0));
        }
        seen.cut(span.n_past);
        for (size_t i = 0; i < span.n; i += n_rows_chunk) {
            const size_t n_chunk = std::min(n_rows_chunk, span.n - i);
            read_rows(s, i, n_chunk, seen.append(span.tokens + i, n_chunk));
            trim_rows(span.sequence);
        }
    }
}

// Drops rows that are far back, evaluating the entries first that need them.
void HeadDrafter::trim_rows(int32_t text) {
    SeenText & seen = at(text).seen;
    if (seen.end() - seen.rows_begin() <= n_rows_most) {
        return;
    }
    cut_entries(text, seen.tokens(), seen.begin(), seen.end());
    if (seen.end() > next_entry(text) + n_rows_kept) {
        make_room({text}, seen.end() - next_entry(text));
        catch_up({{text, seen.tokens(), seen.begin(), seen.end()}});
    }
    seen.drop_rows(std::min(seen.end() - n_rows_kept, next_entry(text) - 1));
}

// Forgets what does not belong to `history`. Returns whether the row is there that the draft starts from.
bool HeadDrafter::sync(int32_t text, const std::vector<int32_t> & history) {
    const size_t last = history.size() - 1;
    SeenText & seen = at(text).seen;
    if (seen.begin() > last) {
        return false;
    }
    seen.cut(seen.begin() +
             n_common(seen.tokens().data(), seen.tokens().size(), history.data() + seen.begin(), last - seen.begin()));
    cut_entries(text, history, 0, last);
    return last > 0 && seen.end() == last && seen.has_row_before(last);
}

// Texts for which the cache has no room start again with what there are rows for.
void HeadDrafter::make_room(const std::vector<int32_t> & texts, size_t n_new) {
    if (!memories_.make_room(texts, n_new)) {
        for (const int32_t text : texts) {
            restart_at_rows(text);
        }
    }
}

// Collects what goes with tokens.
void HeadDrafter::gather_inputs(const std::vector<Wanted> & wanted) {
    rows_.clear();
    for (const Wanted & one : wanted) {
        const size_t n_without = one.entry == 0 ? 1 : 0; // nothing comes before the first token of a text
        if (one.n > n_without) {
            const float * rows = at(one.text).seen.row(one.entry + n_without - 1);
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
        const size_t n_without = one.entry == 0 ? shape_.input_width : 0;
        std::fill_n(one.out, n_without, 0.0f);
        const size_t n = one.n * shape_.input_width - n_without;
        std::copy_n(from, n, one.out + n_without);
        from += n;
    }
}

// Evaluates the entries that are wanted, under every head.
void HeadDrafter::catch_up(const std::vector<Goal> & goals) {
    for (const Goal & goal : goals) {
        if (!at(goal.text).seen.has_row_before(next_entry(goal.text))) {
            restart_at_rows(goal.text);
        }
    }
    std::vector<TextMemories::Part> parts;
    std::vector<std::vector<float>> inputs(goals.size());
    std::vector<Wanted> wanted;
    const auto forget = [&] { // the next head's layer takes the same cells
        for (const Wanted & one : wanted) {
            memories_.at(one.text).truncate(one.entry - at(one.text).begin);
        }
    };
    while (true) {
        parts.clear();
        wanted.clear();
        for (size_t i = 0; i < goals.size(); i++) {
            const Goal & goal = goals[i];
            const size_t entry = next_entry(goal.text);
            if (entry < goal.end) {
                const size_t n = std::min(goal.end - entry, static_cast<size_t>(own_.n_batch()));
                inputs[i].resize(n * shape_.input_width);
                wanted.push_back({goal.text, entry, n, inputs[i].data()});
                parts.push_back({goal.text, goal.tokens.data() + (entry - goal.offset), n, n, inputs[i].data()});
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
                memories_.evaluate(parts, [&](size_t i, size_t) { n_evaluated_ += static_cast<int64_t>(parts[i].n); });
            }
        } catch (...) {
            forget();
            throw;
        }
    }
}

void HeadDrafter::propose(const std::vector<DraftRequest> & requests) {
    std::vector<Job> jobs;
    std::vector<int32_t> texts;
    size_t n_new = 0;
    for (const DraftRequest & request : requests) {
        if (sync(request.text, *request.history)) {
            const int32_t n_max = is_chain() ? std::min(request.n_max, shape_.n_heads) : request.n_max;
            if (!at(request.text).seen.has_row_before(next_entry(request.text))) {
                restart_at_rows(request.text);
            }
            jobs.push_back({request.text, *request.history, request.out, static_cast<size_t>(n_max), request.wants_rows,
                            request.draw});
            texts.push_back(request.text);
            n_new += request.history->size() - next_entry(request.text) + jobs.back().n_max - 1;
        }
    }
    if (jobs.empty()) {
        return;
    }
    make_room(texts, n_new);
    // One head takes the last token along with what is pending; chained ones each build the draft's stretch anew.
    std::vector<Goal> goals;
    const size_t n_pending = is_chain() ? 0 : std::min(n_merged, static_cast<size_t>(own_.n_batch()) - 1);
    for (const Job & job : jobs) {
        const size_t last = job.history.size() - 1;
        if (last - next_entry(job.text) > n_pending) {
            goals.push_back({job.text, job.history, 0, last});
        }
    }
    catch_up(goals);
    std::vector<Wanted> wanted;
    for (Job & job : jobs) {
        job.entry = next_entry(job.text);
        job.tokens.assign(job.history.begin() + static_cast<std::ptrdiff_t>(job.entry), job.history.end());
        job.inputs.resize(job.tokens.size() * shape_.input_width);
        wanted.push_back({job.text, job.entry, job.tokens.size(), job.inputs.data()});
    }
    gather_inputs(wanted);
    try {
        draft(jobs);
    } catch (...) {
        keep_entries(jobs);
        throw;
    }
    keep_entries(jobs);
    for (Job & job : jobs) {
        job.out->tokens = std::move(job.drafted);
    }
}

// Keeps the entries with rows of the target, and not those that a draft left.
void HeadDrafter::keep_entries(const std::vector<Job> & jobs) {
    select(0);
    for (const Job & job : jobs) {
        const size_t end = is_chain() ? job.entry : job.history.size();
        memories_.at(job.text).truncate(end - at(job.text).begin);
    }
}

// A token for each text that goes on, until none does. Rows are produced for all tokens: where they are wanted of some
// only, the heads' graphs answer with those of the first ones.
void HeadDrafter::draft(std::vector<Job> & jobs) {
    std::vector<Job *> active;
    for (Job & job : jobs) {
        active.push_back(&job);
    }
    for (int32_t step = 0; !active.empty(); step++) {
        std::vector<TextMemories::Part> parts;
        for (const Job * job : active) {
            if (is_chain()) {
                memories_.at(job->text).truncate(job->entry - at(job->text).begin);
            }
            parts.push_back({job->text, job->tokens.data(), job->tokens.size(), 0, job->inputs.data()});
        }
        select(step);
        memories_.evaluate(parts, [&](size_t i, size_t span) {
            Job & job = *active[i];
            n_evaluated_ += static_cast<int64_t>(job.tokens.size());
            const size_t last = job.tokens.size() - 1;
            const float * row = own_.row(span, last);
            const float * own = llama_get_embeddings_nextn_ith(own_.context(), own_.batch_index(span, last));
            if (own == nullptr) {
                throw Error(PYFLY_STATUS_INTERNAL, std::string("llama.cpp kept no row of the ") + shape_.name);
            }
            const auto token =
                draft_token(row, static_cast<size_t>(own_.n_vocab()), p_min_, shape_.name, job.draw, job.out->drawn);
            if (token) {
                job.drafted.push_back(*token);
                if (job.wants_rows) {
                    job.out->rows.insert(job.out->rows.end(), row, row + own_.n_vocab());
                }
            }
            job.is_done = !token || job.drafted.size() == job.n_max;
            if (!job.is_done) {
                if (!is_chain()) {
                    job.tokens.clear();
                    job.inputs.clear();
                }
                job.tokens.push_back(*token);
                job.inputs.insert(job.inputs.end(), own, own + shape_.input_width);
            }
        });
        active.erase(std::remove_if(active.begin(), active.end(), [](const Job * job) { return job->is_done; }),
                     active.end());
    }
}

} // namespace pyfly
