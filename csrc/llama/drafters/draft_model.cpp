#include "draft_model.h"

#include <algorithm>
#include <cmath>

#include "bounded_loop.h"
#include "drafters/draft_token.h"
#include "error.h"
#include "guard.h"

namespace pyfly {

namespace {

// Sizes of one family are padded differently: Qwen2.5-7B has 152,064 tokens and its 0.5B 151,936. llama.cpp allows as
// many.
constexpr int32_t most_padding = 128;

// Whether a window of n_ctx positions is too far behind to move on: it begins again with the most recent half.
bool begins_again(size_t n_held, size_t n_new, size_t n_ctx) {
    return n_held + n_new > n_ctx && n_new > n_ctx / 2;
}

} // namespace

ModelPointer DraftModel::open(const llama_model * target, const ModelFile & file, const OpenDraft & open,
                              bool is_translated) {
    file.require_model();
    if (file.integer("pooling_type").value_or(0) > 0) {
        throw Error(PYFLY_STATUS_INCOMPATIBLE,
                    "the draft model '" + file.path() + "' makes embeddings, not text; use another file");
    }
    if (is_translated) {
        return open(file, "draft model", DraftKind::model);
    }
    return open_sharing_vocabulary(target, file, open, "draft model", DraftKind::model, most_padding,
                                   "use one of the same model family, or {cross}");
}

// n_positions is set to the most positions that a request can have, 0: any number.
ModelPointer DraftModel::load(const LlamaTarget & target, const pyfly_draft_model_config & config, bool is_translated,
                              size_t & n_positions) {
    const ModelFile file(config.model_path ? config.model_path : "");
    n_positions = static_cast<size_t>(file.n_learned_positions());
    return open(llama_get_model(target.context()), file, open_with_weights(target, config), is_translated);
}

DraftModel::DraftModel(const LlamaTarget & target, const pyfly_draft_model_config & config, bool is_translated)
    : p_min_(require_p_min(config.p_min)), model_(load(target, config, is_translated, n_positions_)),
      context_(make_draft_context(target, model_.get(), draft_context_params(target, config), "draft model")),
      own_(context_.get(), followed_pool(target, config), "draft model", is_recurrent(model_.get())), memories_(own_),
      n_vocab_(static_cast<size_t>(is_translated ? own_.n_vocab() : target.n_vocab())),
      n_shared_(std::min(n_vocab_, static_cast<size_t>(own_.n_vocab()))) {
    n_ctx_of_all_ = static_cast<size_t>(own_.n_cells() / own_.n_sequences());
    // A request that takes more than its share would push another one out, which has to begin anew and does the same.
    n_ctx_ = own_.n_sequences() > 1 || config.n_ctx > 0 ? n_ctx_of_all_ : static_cast<size_t>(own_.n_ctx());
    if (n_positions_ > 0) { // llama.cpp rounds contexts up
        n_ctx_of_all_ = std::min(n_ctx_of_all_, n_positions_);
        n_ctx_ = std::min(n_ctx_, n_positions_);
    }
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
    memories_.clear(0);
}

// Tokens that are to come behind what its memory holds.
size_t DraftModel::n_new(const Job & job) const {
    return job.history.size() - memories_.end(job.slot) + job.n_more;
}

// Moves the window on its history, so that what is to come fits into n_ctx positions.
void DraftModel::move_window(const Job & job, size_t n_ctx) {
    const size_t n_held = memories_.n_held(job.slot), keep = n_ctx / 2;
    if (n_held + n_new(job) <= n_ctx) {
        return;
    }
    // So does one whose cache cannot shift.
    if (begins_again(n_held, n_new(job), n_ctx) || !memories_.shift(job.slot, n_held - keep)) {
        memories_.clear(job.slot, job.history.size() > keep ? job.history.size() - keep : 0);
    }
}

size_t DraftModel::n_behind(int32_t slot, const std::vector<int32_t> & history) const {
    const size_t n_stays = memories_.n_staying(slot, history.data(), history.size() - 1);
    const size_t n_followed = n_stays > 0 ? memories_.begin(slot) + n_stays : 0;
    const size_t behind = history.size() - 1 - n_followed;
    if (begins_again(n_stays, behind, n_ctx_)) {
        return n_ctx_ / 2 - 1;
    }
    return behind > 1 ? behind : 0; // a single token goes with the last one
}

// Everything but the last token, whose row starts the draft.
size_t DraftModel::prepare(int32_t slot, const std::vector<int32_t> & history, size_t n_most) {
    return catch_up({{slot, history, 0}}, n_most);
}

// At most one batch of each request, of at most n_most tokens. Returns how many tokens are left of the one that is
// furthest behind.
size_t DraftModel::catch_up(const std::vector<Job> & jobs, size_t n_most) {
    std::vector<int32_t> slots;
    size_t n_all = 0;
    for (const Job & job : jobs) {
        memories_.follow(job.slot, job.history.data(), job.history.size() - 1); // the last one's row starts the draft
        move_window(job, n_ctx_);
        slots.push_back(job.slot);
        n_all += n_new(job);
    }
    if (!memories_.make_room(slots, n_all)) {
        for (const Job & job : jobs) {
            move_window(job, n_ctx_of_all_);
        }
    }
    std::vector<SlotMemories::Part> parts;
    for (const Job & job : jobs) {
        const size_t begin = memories_.end(job.slot);
        const size_t n = std::min({job.history.size() - 1 - begin, static_cast<size_t>(own_.n_batch()), n_most});
        if (n > 1) { // a single one goes with the last token, as after a fully accepted draft
            parts.push_back({job.slot, job.history.data() + begin, n, n});
        }
    }
    memories_.evaluate(parts, [&](size_t part, size_t) { n_evaluated_ += static_cast<int64_t>(parts[part].n); });
    size_t n_left = 0;
    for (const Job & job : jobs) {
        n_left = std::max(n_left, job.history.size() - 1 - memories_.end(job.slot));
    }
    return n_left > 1 ? n_left : 0;
}

void DraftModel::propose(const std::vector<DraftRequest> & requests) {
    std::vector<Job> jobs;
    for (const DraftRequest & request : requests) {
        const size_t n_max = std::min(static_cast<size_t>(request.n_max), n_ctx_of_all_ / 4);
        // The last is not evaluated.
        jobs.push_back(
            {request.slot, *request.history, n_max - 1, request.out, request.wants_rows, request.draw, request.stop});
    }
    until_none_is_left([&] { return catch_up(jobs); });
    try {
        draft(jobs);
    } catch (...) {
        for (const Job & job : jobs) {
            *job.out = {};
        }
        throw;
    }
}

// One token for each request that goes on, until none does.
void DraftModel::draft(std::vector<Job> & jobs) {
    std::vector<Job *> active;
    std::vector<SlotMemories::Part> parts;
    for (Job & job : jobs) {
        const size_t begin = memories_.end(job.slot), n = job.history.size() - begin;
        active.push_back(&job);
        parts.push_back({job.slot, job.history.data() + begin, n, n - 1});
    }
    while (!active.empty()) {
        memories_.evaluate(parts, [&](size_t i, size_t span) {
            n_evaluated_ += static_cast<int64_t>(parts[i].n);
            take(*active[i], own_.row(span, parts[i].n - 1));
        });
        active.erase(std::remove_if(active.begin(), active.end(), [](const Job * job) { return job->is_done; }),
                     active.end());
        parts.clear();
        for (const Job * job : active) {
            parts.push_back({job->slot, &job->out->tokens.back(), 1, 0});
        }
    }
}

// Drafts from a row.
void DraftModel::take(Job & job, const float * row) const {
    Proposal & out = *job.out;
    const RowMax max = require_row(row, n_shared_, "draft model");
    const auto [token, is_last] = draft_token(row, n_shared_, max, p_min_, job.draw, job.stop, out);
    if (token) {
        out.tokens.push_back(*token);
        if (job.wants_rows) {
            out.rows.insert(out.rows.end(), row, row + n_shared_);
            out.rows.resize(out.rows.size() + n_vocab_ - n_shared_, -INFINITY);
        }
    }
    job.is_done = !token || is_last || out.tokens.size() > job.n_more;
}

} // namespace pyfly

extern "C" pyfly_status pyfly_drafter_model_new(pyfly_target * target, const pyfly_draft_model_config * config,
                                                pyfly_drafter ** out, pyfly_error * error) {
    return pyfly::guard(error, [&] {
        *out = new pyfly_drafter{std::make_unique<pyfly::DraftModel>(pyfly::llama_target(target), *config)};
    });
}
