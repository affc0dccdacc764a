#include "step_head.h"

#include <algorithm>

#include "drafters/draft_token.h"
#include "error.h"
#include "llama/release_llama.h"

namespace pyfly {

namespace {

constexpr size_t n_merged = 16; // most entries that are evaluated together with a draft's first step

} // namespace

StepHead::StepHead(Parts parts, double p_min) : HeadDrafter(std::move(parts), p_min) {
    llama_set_embeddings_nextn(own().context(), true, /*masked=*/true);
}

size_t StepHead::n_cells(const std::vector<Job> & jobs) const {
    size_t n = 0;
    for (const Job & job : jobs) {
        n += job.n_max;
    }
    return n;
}

// One head takes the last token along with what is pending; chained ones each build the draft's stretch anew.
void StepHead::draft(std::vector<Job> & jobs) {
    std::vector<Goal> goals;
    const size_t n_pending = is_chain() ? 0 : std::min(n_merged, static_cast<size_t>(own().n_batch()) - 1);
    for (const Job & job : jobs) {
        if (job.last() - next_entry(job.slot) > n_pending) {
            goals.push_back({job.slot, job.history, 0, job.last()});
        }
    }
    catch_up(goals);
    std::vector<Step> all;
    std::vector<Wanted> wanted;
    for (Job & job : jobs) {
        const size_t entry = next_entry(job.slot);
        all.push_back({&job, entry, {job.history.begin() + static_cast<std::ptrdiff_t>(entry), job.history.end()}, {}});
        all.back().inputs.resize(all.back().tokens.size() * shape().input_width);
    }
    for (Step & step : all) {
        wanted.push_back({step.job->slot, step.entry, step.tokens.size(), step.inputs.data()});
    }
    gather_inputs(wanted);
    // Kept are the entries with rows of the target, and not those that a draft left.
    const auto keep = [&] {
        select(0);
        for (const Step & step : all) {
            keep_entries(step.job->slot, is_chain() ? step.entry : step.job->history.size());
        }
    };
    try {
        take_steps(all);
    } catch (...) {
        keep();
        throw;
    }
    keep();
}

// A token for each request that goes on, until none does. Rows are produced for all tokens: where they are wanted of
// some only, the heads' graphs answer with those of the first ones.
void StepHead::take_steps(std::vector<Step> & all) {
    std::vector<Step *> active;
    for (Step & step : all) {
        active.push_back(&step);
    }
    for (int32_t head = 0; !active.empty(); head++) {
        std::vector<SlotMemories::Part> parts;
        for (const Step * step : active) {
            if (is_chain()) {
                keep_entries(step->job->slot, step->entry);
            }
            parts.push_back({step->job->slot, step->tokens.data(), step->tokens.size(), 0, step->inputs.data()});
        }
        select(head);
        evaluate(parts, [&](size_t i, size_t span) {
            Step & step = *active[i];
            Job & job = *step.job;
            const size_t last = step.tokens.size() - 1;
            const float * row = own().row(span, last);
            const float * hidden = llama_get_embeddings_nextn_ith(own().context(), own().batch_index(span, last));
            if (hidden == nullptr) {
                throw Error(PYFLY_STATUS_INTERNAL, std::string("llama.cpp kept no row of the ") + shape().name);
            }
            const size_t n_vocab = static_cast<size_t>(own().n_vocab());
            const RowMax max = require_row(row, n_vocab, shape().name);
            const auto [token, is_last] = draft_token(row, n_vocab, max, p_min(), job.draw, job.stop, *job.out);
            if (token) {
                job.drafted.push_back(*token);
                if (job.wants_rows) {
                    job.out->rows.insert(job.out->rows.end(), row, row + own().n_vocab());
                }
            }
            step.is_done = !token || is_last || job.drafted.size() == job.n_max;
            if (!step.is_done) {
                if (!is_chain()) {
                    step.tokens.clear();
                    step.inputs.clear();
                }
                step.tokens.push_back(*token);
                step.inputs.insert(step.inputs.end(), hidden, hidden + shape().input_width);
            }
        });
        active.erase(std::remove_if(active.begin(), active.end(), [](const Step * step) { return step->is_done; }),
                     active.end());
    }
}

} // namespace pyfly
