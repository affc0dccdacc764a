#include "dflash.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "drafters/draft_token.h"
#include "error.h"
#include "guard.h"
#include "llama/release.h"
#include "llama/release_llama.h"

namespace pyfly {

namespace {

constexpr int64_t default_block_size = 16;
constexpr int64_t most_rows_of_chain = 32; // llama.cpp's graph of a Markov head grows with every row, its room does not

const char * name_of(bool is_dspark) {
    return is_dspark ? "DSpark head" : "DFlash head";
}

[[noreturn]] void refuse(pyfly_status status, const std::string & why) {
    throw Error(status, why);
}

} // namespace

// Everything that llama.cpp would take for granted of the file.
DFlash::Block DFlash::read_block(const ModelFile & file, bool is_dspark, const std::string & what) {
    const auto number = [](int64_t n) { return std::to_string(n); };
    const bool has_selector = file.has_tensor("selector_hidden.weight");
    const int64_t n_vocab = static_cast<int64_t>(file.n_tokens());
    if (DFlash::is_dspark(file) != is_dspark) {
        refuse(PYFLY_STATUS_INCOMPATIBLE, is_dspark ? what + " has no Markov head; it is a DFlash head, use {dflash}"
                                                    : what + " has a Markov head; it is a DSpark head, use {dspark}");
    }
    if (release < first_with_block_heads) {
        refuse(PYFLY_STATUS_INCOMPATIBLE, what + " needs llama-cpp-python " + release_name(first_with_block_heads) +
                                              " or newer; upgrade it or choose another drafter");
    }
    if (file.integer("hyper_connection.count").value_or(0) > 0 || (is_dspark && has_selector)) {
        refuse(PYFLY_STATUS_INCOMPATIBLE,
               what + (has_selector ? " has both a Markov head and a selector" : " is made of DeepSeek-V4 blocks") +
                   ", which is not supported; choose another drafter");
    }
    const int64_t size = file.integer("block_size").value_or(is_dspark || has_selector ? 0 : default_block_size);
    const bool samples_anchor = is_dspark && file.boolean("sample_from_anchor").value_or(true);
    const int64_t n_most = samples_anchor ? size : size - 1;
    if (n_most < 1 || size > (is_dspark ? most_rows_of_chain : int64_t{PYFLY_MAX_DEPTH} + 1)) {
        refuse(PYFLY_STATUS_INCOMPATIBLE, what + " drafts blocks of " + number(size) + " rows; from 2 to " +
                                              number(is_dspark ? most_rows_of_chain : PYFLY_MAX_DEPTH + 1) +
                                              " can be run; choose another head");
    }
    const int64_t n_candidates = has_selector ? file.integer("selector_top_k").value_or(0) : 0;
    if (n_candidates > n_vocab) {
        refuse(PYFLY_STATUS_INCOMPATIBLE, what + " chooses among " + number(n_candidates) + " tokens of " +
                                              number(n_vocab) + "; convert it again");
    }
    const std::optional<int64_t> mask = file.mask_token();
    if (!mask || *mask < 0 || *mask >= n_vocab) {
        refuse(PYFLY_STATUS_INCOMPATIBLE,
               what +
                   (mask ? " names the mask token " + number(*mask) + " of " + number(n_vocab)
                         : std::string(" names no mask token")) +
                   "; convert it again");
    }
    return {static_cast<int32_t>(n_most),        samples_anchor ? size_t{0} : size_t{1},
            static_cast<int32_t>(*mask),         file.boolean("attention.causal").value_or(false),
            file.has_tensor("conf_proj.weight"), static_cast<int32_t>(n_candidates)};
}

DFlash::Opened DFlash::open(const llama_model * target, const ModelFile & file, bool is_dspark, int32_t draft_max,
                            double p_min, const OpenDraft & open) {
    const char * name = name_of(is_dspark);
    const std::string what = std::string("the ") + name + " '" + file.path() + "'";
    if (file.architecture() != "dflash") {
        refuse(PYFLY_STATUS_INCOMPATIBLE, "'" + file.path() + "' is of architecture " + file.architecture() +
                                              ", not a " + name + "; if it is a model, use {draft_model}");
    }
    file.require_loadable();
    const Block block = read_block(file, is_dspark, what);
    const int64_t n_embd = llama_model_n_embd(target);
    if (file.integer("embedding_length") != n_embd) {
        refuse(PYFLY_STATUS_INCOMPATIBLE,
               what + " reads hidden states of width " + std::to_string(file.integer("embedding_length").value_or(0)) +
                   ", the target's have " + std::to_string(n_embd) + "; use the head of this very model");
    }
    if (draft_max > block.n_most) {
        refuse(PYFLY_STATUS_INVALID, "{draft_max} is " + std::to_string(draft_max) + ", but " + what +
                                         " drafts blocks of " + std::to_string(block.n_most) +
                                         " tokens; lower {draft_max}");
    }
    if (is_dspark && p_min > 0.0 && !block.has_confidence) {
        refuse(PYFLY_STATUS_INVALID, what + " has no confidence head, which p_min needs; set p_min to 0");
    }
    require_layer_head(target, file, what);
    ModelPointer model = open_sharing_vocabulary(target, file, open, name, DraftKind::head);
    require_target_layers(target, model.get(), what);
    return {std::move(model), block};
}

DFlash::Loaded DFlash::load(const LlamaTarget & target, const pyfly_draft_model_config & config, bool is_dspark,
                            int32_t draft_max) {
    const llama_model * target_model = llama_get_model(target.context());
    auto [model, block] = open(target_model, ModelFile(config.model_path ? config.model_path : ""), is_dspark,
                               draft_max, config.p_min, open_with_weights(target, config));
    const char * name = name_of(is_dspark);
    llama_context_params params = draft_context_params(target, config);
    params.ctx_other = target.context();
    // Attention that is not causal takes a batch in one piece.
    const uint32_t n_rows = static_cast<uint32_t>(block.n_most) + 1;
    params.n_batch = params.n_ubatch = std::min(std::max(params.n_ubatch, n_rows), params.n_ctx);
    ContextPointer context = make_draft_context(target, model.get(), params, name);
    const size_t width =
        llama_model_target_layer_ids_n(model.get()) * static_cast<size_t>(llama_model_n_embd(target_model));
    return {{std::move(model), std::move(context), followed_pool(target, config), {name, width, width, 0, 0, 1}},
            block};
}

DFlash::DFlash(LlamaTarget & target, const pyfly_draft_model_config & config, bool is_dspark, int32_t draft_max)
    : DFlash(target, config, load(target, config, is_dspark, draft_max)) {}

DFlash::DFlash(LlamaTarget & target, const pyfly_draft_model_config & config, Loaded loaded)
    : HeadDrafter(std::move(loaded.parts), config.p_min), block_(loaded.block),
      rows_(target, llama_get_model(own().context())) {
    llama_set_causal_attn(own().context(), block_.is_causal);
    // What the confidence head and the selector say comes where other heads answer with hidden states.
    if (block_.has_confidence || block_.n_candidates > 0) {
        llama_set_embeddings_nextn(own().context(), true, /*masked=*/true);
    }
}

void DFlash::make_inputs(const float * rows, size_t n, float * out) {
    std::memcpy(out, rows, n * shape().row_width * sizeof(float));
}

size_t DFlash::n_rows(const std::vector<Job> & jobs) const {
    size_t n = 0;
    for (const Job & job : jobs) {
        n = std::max(n, job.n_max);
    }
    return n + block_.first_row;
}

size_t DFlash::n_cells(const std::vector<Job> & jobs) const {
    return jobs.size() * n_rows(jobs);
}

void DFlash::draft(std::vector<Job> & jobs) {
    std::vector<Goal> goals;
    for (const Job & job : jobs) {
        goals.push_back({job.slot, job.history, 0, job.last()});
    }
    catch_up(goals);
    std::vector<std::vector<int32_t>> blocks;
    std::vector<SlotMemories::Part> parts;
    for (const Job & job : jobs) {
        blocks.emplace_back(n_rows(jobs), block_.mask_token).front() = job.history.back();
    }
    for (size_t i = 0; i < jobs.size(); i++) {
        parts.push_back({jobs[i].slot, blocks[i].data(), blocks[i].size(), 0});
    }
    const auto keep = [&] {
        for (const Job & job : jobs) {
            keep_entries(job.slot, job.last());
        }
    };
    try {
        evaluate(parts, [&](size_t i, size_t span) {
            if (block_.n_candidates > 0) {
                read_chain(span, jobs[i]);
            } else {
                read_block_rows(span, jobs[i]);
            }
        });
    } catch (...) {
        keep();
        throw;
    }
    keep();
}

const float * DFlash::own_row(size_t span, size_t i) {
    const float * row = llama_get_embeddings_nextn_ith(own().context(), own().batch_index(span, i));
    if (row == nullptr) {
        throw Error(PYFLY_STATUS_INTERNAL, std::string("llama.cpp kept no row of the ") + shape().name);
    }
    return row;
}

// The best token of every row, or what is drawn from it. A row of a Markov head follows the best tokens before it.
void DFlash::read_block_rows(size_t span, Job & job) {
    const bool is_limited = block_.has_confidence && p_min() > 0.0;
    const size_t n_vocab = static_cast<size_t>(own().n_vocab());
    for (size_t i = block_.first_row; job.drafted.size() < job.n_max; i++) {
        if (is_limited && !(own_row(span, i)[0] >= p_min())) {
            break;
        }
        const float * row = own().row(span, i);
        const auto confidence = block_.has_confidence ? std::optional<double>(own_row(span, i)[0]) : std::nullopt;
        const auto [token, is_last] = draft_token(row, n_vocab, require_row(row, n_vocab, shape().name),
                                                  is_limited ? 0.0 : p_min(), job.draw, job.stop, *job.out, confidence);
        if (!token) {
            break;
        }
        job.drafted.push_back(*token);
        if (job.wants_rows) {
            job.out->rows.insert(job.out->rows.end(), row, row + own().n_vocab());
        }
        if (is_last) {
            break;
        }
    }
}

// A row of the selector: the ids of its n candidates, then [n][n] scores, of each behind each candidate of the row
// before (of the first row, behind the anchor, n times the same).
void DFlash::read_chain(size_t span, Job & job) {
    const size_t n = static_cast<size_t>(block_.n_candidates);
    size_t chosen = 0;
    for (size_t i = block_.first_row; job.drafted.size() < job.n_max; i++) {
        const float * row = own_row(span, i);
        const float * scores = row + n + chosen * n;
        chosen = static_cast<size_t>(std::max_element(scores, scores + n) - scores);
        double sum = 0.0;
        for (size_t k = 0; k < n; k++) {
            sum += std::exp(static_cast<double>(scores[k]) - scores[chosen]);
        }
        const float id = row[chosen];
        if (!std::isfinite(sum) || !(id >= 0.0f && id < static_cast<float>(own().n_vocab()))) {
            throw Error(PYFLY_STATUS_NOT_FINITE,
                        std::string("the ") + shape().name + "'s selector produced no scores; check its file");
        }
        if (1.0 / sum < p_min()) {
            break;
        }
        job.drafted.push_back(static_cast<int32_t>(id));
    }
}

} // namespace pyfly

extern "C" {

pyfly_status pyfly_drafter_dflash_new(pyfly_target * target, const pyfly_draft_model_config * config, int32_t draft_max,
                                      pyfly_drafter ** out, pyfly_error * error) {
    return pyfly::guard(error, [&] {
        *out =
            new pyfly_drafter{std::make_unique<pyfly::DFlash>(pyfly::llama_target(target), *config, false, draft_max)};
    });
}

pyfly_status pyfly_drafter_dspark_new(pyfly_target * target, const pyfly_draft_model_config * config, int32_t draft_max,
                                      pyfly_drafter ** out, pyfly_error * error) {
    return pyfly::guard(error, [&] {
        *out =
            new pyfly_drafter{std::make_unique<pyfly::DFlash>(pyfly::llama_target(target), *config, true, draft_max)};
    });
}
}
