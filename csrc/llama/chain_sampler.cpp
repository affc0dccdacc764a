#include "chain_sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "error.h"
#include "rows.h"

namespace pyfly {

namespace {

// The samplers that llama-cpp-python makes of logits processors have no name.
const char * name_of(const llama_sampler * sampler) {
    return sampler->iface->name != nullptr ? llama_sampler_name(sampler) : "";
}

// llama.cpp marks a sampler that does nothing with a leading '?'.
bool is_disabled(const llama_sampler * sampler) {
    return name_of(sampler)[0] == '?';
}

bool is_grammar(const llama_sampler * sampler) {
    return std::strcmp(name_of(sampler), "grammar") == 0 || std::strcmp(name_of(sampler), mask_name) == 0;
}

bool selects(const llama_sampler * sampler) {
    static const std::array<const char *, 13> names = {"greedy",      "dist",        "top-k",     "typical", "top-p",
                                                       "min-p",       "temp",        "temp-ext",  "xtc",     "mirostat",
                                                       "mirostat-v2", "top-n-sigma", "adaptive-p"};
    const char * name = name_of(sampler);
    name += std::strspn(name, "?+-"); // marks for "disabled" and "runs on the backend"
    return std::any_of(names.begin(), names.end(), [&](const char * n) { return std::strcmp(n, name) == 0; });
}

// Whether samplers begin..end-1 of a chain only take tokens away and scale, and the last one draws from what is left.
bool draws_from_distribution(llama_sampler * chain, int32_t begin, int32_t end) {
    static const std::array<const char *, 7> names = {"top-k", "typical",  "top-p",      "min-p",
                                                      "temp",  "temp-ext", "top-n-sigma"};
    for (int32_t i = begin; i < end - 1; i++) {
        const char * name = name_of(llama_sampler_chain_get(chain, i));
        name += std::strspn(name, "?+-");
        if (std::none_of(names.begin(), names.end(), [&](const char * n) { return std::strcmp(n, name) == 0; })) {
            return false;
        }
    }
    const char * last = name_of(llama_sampler_chain_get(chain, end - 1));
    return std::strcmp(last + std::strspn(last, "?+-"), "dist") == 0;
}

// A logit that is NaN or +inf spoils every probability; -inf only forbids its token.
bool has_distribution(const std::vector<llama_token_data> & data) {
    const auto spoils = [](const llama_token_data & d) { return std::isnan(d.logit) || d.logit == INFINITY; };
    return std::none_of(data.begin(), data.end(), spoils) &&
           std::any_of(data.begin(), data.end(), [](const llama_token_data & d) { return std::isfinite(d.logit); });
}

[[noreturn]] void throw_not_finite() {
    throw Error(PYFLY_STATUS_NOT_FINITE,
                "the target's logits row has no distribution left (NaN, +inf, or every token forbidden); check the "
                "model file, the logits processors and the grammar");
}

} // namespace

int32_t count_shaping(const llama_sampler * chain) {
    int32_t n = 0;
    while (n < llama_sampler_chain_n(chain) &&
           !selects(llama_sampler_chain_get(const_cast<llama_sampler *>(chain), n))) {
        n++;
    }
    return n;
}

std::unique_ptr<Sampler> make_sampler(const void * llama_sampler_chain, bool keeps_shaped_row,
                                      bool gives_distributions) {
    if (llama_sampler_chain == nullptr) {
        return std::make_unique<GreedySampler>();
    }
    // llama-cpp-python adds what llama.cpp gave it, also the null of a grammar that does not parse.
    auto * chain = const_cast<llama_sampler *>(static_cast<const llama_sampler *>(llama_sampler_chain));
    for (int32_t i = 0; i < llama_sampler_chain_n(chain); i++) {
        if (llama_sampler_chain_get(chain, i) == nullptr) {
            throw Error(PYFLY_STATUS_INVALID, "llama.cpp could not parse the request's grammar; check its rules");
        }
    }
    LlamaSamplerPtr copy(llama_sampler_clone(static_cast<const llama_sampler *>(llama_sampler_chain)));
    const int32_t n = llama_sampler_chain_n(copy.get());
    const auto at = [&](int32_t i) { return llama_sampler_chain_get(copy.get(), i); };
    const int32_t n_leading = count_shaping(copy.get());
    int32_t n_active = 0, active = -1;
    for (int32_t i = 0; i < n_leading; i++) {
        if (!is_disabled(at(i))) {
            n_active++;
            active = i;
        }
    }
    if (n_leading == n) {
        throw Error(PYFLY_STATUS_INVALID, "the sampler chain selects no token; end it with a greedy or dist sampler");
    }
    const bool is_greedy = n_leading == n - 1 && std::strcmp(name_of(at(n - 1)), "greedy") == 0;
    if (is_greedy && n_active == 0) {
        return std::make_unique<GreedySampler>();
    }
    if (is_greedy && n_active == 1 && is_grammar(at(active))) {
        return std::make_unique<GreedyGrammarSampler>(std::move(copy), active);
    }
    if (gives_distributions && !is_greedy && !draws_from_distribution(copy.get(), n_leading, n)) {
        throw Error(
            PYFLY_STATUS_INVALID,
            "speculative sampling needs a distribution to draw from, which this sampler chain (mirostat, or one "
            "that draws more than once) does not have; leave mirostat_mode at 0, or use another gate");
    }
    return std::make_unique<ChainSampler>(std::move(copy), n_leading, is_greedy, keeps_shaped_row);
}

void ChainSampler::set_candidates(const float * row, size_t n_vocab) {
    data_.resize(n_vocab);
    for (size_t i = 0; i < n_vocab; i++) {
        data_[i] = {static_cast<llama_token>(i), row[i], 0.0f};
    }
    candidates_ = {data_.data(), n_vocab, -1, false};
}

void ChainSampler::apply(int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; i++) {
        llama_sampler * sampler = llama_sampler_chain_get(chain_.get(), i);
        if (sampler->iface->apply) {
            llama_sampler_apply(sampler, &candidates_);
        }
    }
}

// Everything that forbids or reweighs.
void ChainSampler::shape(const float * row, size_t n_vocab) {
    set_candidates(row, n_vocab);
    bool is_finite = has_distribution(data_);
    if (is_finite) {
        apply(0, n_shaping_);
        is_finite = has_distribution(data_);
    }
    if (!is_finite) {
        throw_not_finite();
    }
    if (keeps_shaped_row_) {
        shaped_.assign(n_vocab, -INFINITY);
        for (size_t i = 0; i < candidates_.size; i++) {
            shaped_[static_cast<size_t>(candidates_.data[i].id)] = candidates_.data[i].logit;
        }
    }
}

int32_t ChainSampler::choose(const float * row, size_t n_vocab) {
    shape(row, n_vocab);
    apply(n_shaping_, llama_sampler_chain_n(chain_.get()));
    if (candidates_.selected < 0 || static_cast<size_t>(candidates_.selected) >= candidates_.size) {
        throw Error(PYFLY_STATUS_NATIVE, "the sampler chain selected no token");
    }
    return candidates_.data[candidates_.selected].id;
}

Weights ChainSampler::of_target(const float * row, size_t n_vocab) {
    shape(row, n_vocab);
    apply(n_shaping_, llama_sampler_chain_n(chain_.get()) - 1); // the last one draws
    return weights();
}

Weights ChainSampler::of_draft(const float * row, size_t n_vocab) {
    set_candidates(row, n_vocab);
    apply(n_shaping_, llama_sampler_chain_n(chain_.get()) - 1);
    return weights();
}

// Of the candidates that are left. Where a logit is no longer finite once it is divided by the temperature, llama.cpp
// itself takes the last candidate.
Weights ChainSampler::weights() const {
    Weights logits(candidates_.size);
    for (size_t i = 0; i < candidates_.size; i++) {
        logits[i] = {candidates_.data[i].id, static_cast<double>(candidates_.data[i].logit)};
    }
    Weights weights = softmax(std::move(logits));
    if (weights.empty()) {
        throw Error(PYFLY_STATUS_NOT_FINITE,
                    "a logits row has no distribution left once it is divided by the temperature; raise the "
                    "temperature, or check the logits processors and the logit bias");
    }
    return weights;
}

bool ChainSampler::could_draw(int32_t token) const {
    if (is_greedy_) {
        return true;
    }
    const llama_token_data * end = candidates_.data + candidates_.size;
    return std::any_of(static_cast<const llama_token_data *>(candidates_.data), end,
                       [&](const llama_token_data & d) { return d.id == token && std::isfinite(d.logit); });
}

std::unique_ptr<Sampler> ChainSampler::clone() const {
    return std::make_unique<ChainSampler>(LlamaSamplerPtr(llama_sampler_clone(chain_.get())), n_shaping_, is_greedy_,
                                          keeps_shaped_row_);
}

int32_t GreedyGrammarSampler::choose(const float * row, size_t n_vocab) {
    row_ = row;
    n_vocab_ = n_vocab;
    shaped_.clear();
    const RowMax max = row_max(row, n_vocab);
    if (!max.finite) {
        throw_not_finite();
    }
    llama_token_data favourite = {max.token, max.logit, 0.0f};
    llama_token_data_array candidates = {&favourite, 1, -1, false};
    llama_sampler_apply(llama_sampler_chain_get(chain_.get(), grammar_), &candidates);
    if (std::isfinite(favourite.logit)) {
        return max.token;
    }
    const RowMax allowed = row_max(shaped_row(), n_vocab);
    if (!allowed.finite) {
        throw_not_finite();
    }
    return allowed.token;
}

const float * GreedyGrammarSampler::shaped_row() {
    if (shaped_.empty()) {
        std::vector<llama_token_data> data(n_vocab_);
        for (size_t i = 0; i < n_vocab_; i++) {
            data[i] = {static_cast<llama_token>(i), row_[i], 0.0f};
        }
        llama_token_data_array candidates = {data.data(), n_vocab_, -1, false};
        llama_sampler_apply(llama_sampler_chain_get(chain_.get(), grammar_), &candidates);
        shaped_.resize(n_vocab_);
        for (size_t i = 0; i < candidates.size; i++) {
            shaped_[static_cast<size_t>(candidates.data[i].id)] = candidates.data[i].logit;
        }
    }
    return shaped_.data();
}

std::unique_ptr<Sampler> GreedyGrammarSampler::clone() const {
    return std::make_unique<GreedyGrammarSampler>(LlamaSamplerPtr(llama_sampler_clone(chain_.get())), grammar_);
}

} // namespace pyfly
