#include "draft_model.h"

#include <algorithm>
#include <cmath>

#include "error.h"
#include "guard.h"
#include "handles.h"
#include "llama/model_file.h"

namespace pyfly {

namespace {

ModelPointer load_checked(const LlamaTarget & target, const pyfly_draft_model_config & config) {
    ModelFile(config.model_path ? config.model_path : "").require_model();
    return load_draft(target, config, "draft model", false, most_padding);
}

} // namespace

DraftModel::DraftModel(const LlamaTarget & target, const pyfly_draft_model_config & config)
    : p_min_(require_p_min(config.p_min)), model_(load_checked(target, config)),
      context_(make_draft_context(target, model_.get(), draft_context_params(target, config), "draft model")),
      own_(context_.get(), followed_pool(target, config), "draft model", is_recurrent(model_.get())), memories_(own_),
      offsets_(static_cast<size_t>(memories_.n()), 0), n_vocab_(static_cast<size_t>(target.n_vocab())),
      n_shared_(std::min(n_vocab_, static_cast<size_t>(own_.n_vocab()))) {
    n_ctx_of_all_ = static_cast<size_t>(own_.n_cells() / own_.n_sequences());
    // A text that takes more than its share would push another one out, which has to begin anew and does the same.
    n_ctx_ = own_.n_sequences() > 1 || config.n_ctx > 0 ? n_ctx_of_all_ : static_cast<size_t>(own_.n_ctx());
    if (n_ctx_of_all_ < 16) {
        throw Error(PYFLY_STATUS_INVALID, "the draft's context must hold at least 16 tokens");
    }
    expected_cost_ = static_cast<double>(llama_model_size(model_.get())) /
                     static_cast<double>(llama_model_size(llama_get_model(target.context())));
    warm_up();
}

// Evaluates a token and forgets it. The weights of a file that is mapped are read when they are first used; the
// output's are not used by prompts, so they would make the first draft slow.
void DraftModel::warm_up() {
    const int32_t token = 0;
    memories_.evaluate({{0, &token, 1, 0}}, [](size_t, size_t) {});
    memories_.at(0).clear();
}

// How much of what the text's memory holds is history[offset...], short of the last token, whose row starts the draft.
size_t DraftModel::n_common(int32_t text, const std::vector<int32_t> & history) const {
    const size_t begin = offset(text);
    return begin < history.size() ? memories_.at(text).n_common(history.data() + begin, history.size() - begin - 1) : 0;
}

// Makes the text's memory a prefix of history[offset...].
void DraftModel::sync(const Job & job) {
    if (memories_.at(job.text).truncate(n_common(job.text, job.history)) == 0) {
        offsets_[static_cast<size_t>(job.text)] = 0;
    }
}

// Tokens that are to come behind what its memory holds.
size_t DraftModel::n_new(const Job & job) const {
    return job.history.size() - n_held(job.text) + job.n_more;
}

// Moves the window on its history, so that what is to come fits into n_ctx positions.
void DraftModel::move_window(const Job & job, size_t n_ctx) {
    Memory & memory = memories_.at(job.text);
    size_t & begin = offsets_[static_cast<size_t>(job.text)];
    if (memory.n() + n_new(job) <= n_ctx) {
        return;
    }
    const size_t keep = n_ctx / 2;
    const size_t drop = memory.n() > keep ? memory.n() - keep : 0;
    if (drop > 0 && n_new(job) <= keep && memory.shift(drop)) {
        begin += drop;
    } else {
        // Too far behind, or a cache that cannot shift: start again with the most recent half.
        memory.clear();
        begin = job.history.size() > keep ? job.history.size() - keep : 0;
    }
}

size_t DraftModel::n_behind(int32_t text, const std::vector<int32_t> & history) const {
    const size_t common = n_common(text, history);
    const size_t n_followed = common > 0 ? offset(text) + common : 0;
    const size_t behind = history.size() - 1 - n_followed;
    return behind > 1 ? behind : 0; // a single token goes with the last one
}

// Everything but the last token, whose row starts the draft.
size_t DraftModel::prepare(int32_t text, const std::vector<int32_t> & history) {
    return catch_up({{text, history, 0}});
}

// At most one batch of each text. Returns how many tokens are left of the one that is furthest behind.
size_t DraftModel::catch_up(const std::vector<Job> & jobs) {
    std::vector<int32_t> texts;
    size_t n_all = 0;
    for (const Job & job : jobs) {
        sync(job);
        move_window(job, n_ctx_);
        texts.push_back(job.text);
        n_all += n_new(job);
    }
    if (!memories_.make_room(texts, n_all)) {
        for (const Job & job : jobs) {
            move_window(job, n_ctx_of_all_);
        }
    }
    std::vector<TextMemories::Part> parts;
    for (const Job & job : jobs) {
        const size_t begin = n_held(job.text);
        const size_t n = std::min(job.history.size() - 1 - begin, static_cast<size_t>(own_.n_batch()));
        if (n > 1) { // a single one goes with the last token, as after a fully accepted draft
            parts.push_back({job.text, job.history.data() + begin, n, n});
        }
    }
    memories_.evaluate(parts, [&](size_t part, size_t) { n_evaluated_ += static_cast<int64_t>(parts[part].n); });
    size_t n_left = 0;
    for (const Job & job : jobs) {
        n_left = std::max(n_left, job.history.size() - 1 - n_held(job.text));
    }
    return n_left > 1 ? n_left : 0;
}

void DraftModel::propose(const std::vector<DraftRequest> & requests) {
    std::vector<Job> jobs;
    for (const DraftRequest & request : requests) {
        const size_t n_max = std::min(static_cast<size_t>(request.n_max), n_ctx_of_all_ / 4);
        jobs.push_back({request.text, *request.history, n_max - 1, request.wants_rows}); // the last is not evaluated
    }
    while (catch_up(jobs) > 0) {
    }
    draft(jobs);
    for (size_t i = 0; i < jobs.size(); i++) {
        requests[i].out->tokens = std::move(jobs[i].drafted);
        requests[i].out->rows = std::move(jobs[i].rows);
    }
}

// A token for each text that goes on, until none does.
void DraftModel::draft(std::vector<Job> & jobs) {
    std::vector<Job *> active;
    std::vector<TextMemories::Part> parts;
    for (Job & job : jobs) {
        const size_t n = job.history.size() - n_held(job.text);
        active.push_back(&job);
        parts.push_back({job.text, job.history.data() + n_held(job.text), n, n - 1});
    }
    while (!active.empty()) {
        memories_.evaluate(parts, [&](size_t i, size_t span) {
            Job & job = *active[i];
            n_evaluated_ += static_cast<int64_t>(parts[i].n);
            const float * row = own_.row(span, parts[i].n - 1);
            const auto token = draft_token(row, n_shared_, p_min_, "draft model");
            if (token) {
                job.drafted.push_back(*token);
                if (job.wants_rows) {
                    job.rows.insert(job.rows.end(), row, row + n_shared_);
                    job.rows.resize(job.rows.size() + n_vocab_ - n_shared_, -INFINITY);
                }
            }
            job.is_done = !token || job.drafted.size() > job.n_more;
        });
        active.erase(std::remove_if(active.begin(), active.end(), [](const Job * job) { return job->is_done; }),
                     active.end());
        parts.clear();
        for (const Job * job : active) {
            parts.push_back({job->text, &job->drafted.back(), 1, 0});
        }
    }
}

} // namespace pyfly

extern "C" pyfly_status pyfly_drafter_model_new(pyfly_target * target, const pyfly_draft_model_config * config,
                                                pyfly_drafter ** out, pyfly_error * error) {
    return pyfly::guard(error, [&] {
        *out = new pyfly_drafter{std::make_unique<pyfly::DraftModel>(pyfly::llama_target(target), *config)};
    });
}
