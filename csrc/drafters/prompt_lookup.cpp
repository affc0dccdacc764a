#include "prompt_lookup.h"

#include <algorithm>
#include <string>

#include "error.h"
#include "guard.h"
#include "stretch.h"
#include "target.h"

namespace pyfly {

namespace {

const PromptLookup::Config & required(const PromptLookup::Config & config) {
    if (config.min_ngram < 1 || config.max_ngram < config.min_ngram || config.max_ngram > NgramIndex::longest) {
        throw Error(PYFLY_STATUS_INVALID, "prompt lookup needs 1 <= min_ngram_size <= max_ngram_size <= 64");
    }
    if (config.num_pred < 1) {
        throw Error(PYFLY_STATUS_INVALID, "prompt lookup needs num_pred_tokens >= 1");
    }
    if (config.match != PYFLY_LOOKUP_LATEST && config.match != PYFLY_LOOKUP_EARLIEST) {
        throw Error(PYFLY_STATUS_INVALID, "unknown lookup rule " + std::to_string(config.match));
    }
    if (config.n_memory > PYFLY_MAX_LOOKUP) {
        throw Error(PYFLY_STATUS_INVALID, "prompt lookup remembers at most " + std::to_string(PYFLY_MAX_LOOKUP) +
                                              " tokens; lower the size of its memory");
    }
    return config;
}

} // namespace

PromptLookup::PromptLookup(const Config & config, const Vocabulary * vocabulary, const std::vector<int32_t> & texts,
                           const std::vector<int32_t> & answers)
    : config_(required(config)), vocabulary_(vocabulary), named_(config.max_ngram, config.min_ngram) {
    for (const std::vector<int32_t> * all : {&texts, &answers}) {
        if (all->size() > PYFLY_MAX_LOOKUP) {
            throw Error(PYFLY_STATUS_INVALID, "prompt lookup looks in at most " + std::to_string(PYFLY_MAX_LOOKUP) +
                                                  " tokens of other texts; name fewer or shorter ones");
        }
        for (const int32_t token : *all) {
            if (token < NgramIndex::separator || (vocabulary != nullptr && token >= vocabulary->n())) {
                throw Error(PYFLY_STATUS_INVALID, "prompt lookup was given a text with token " + std::to_string(token) +
                                                      ", which the vocabulary does not have");
            }
        }
    }
    for (const int32_t token : texts) {
        named_.append(token);
    }
    answers_of(0);
    remember(answers.data(), answers.size(), 0);
}

NgramIndex & PromptLookup::answers_of(int32_t owner) {
    return answers_.try_emplace(owner, config_.max_ngram, config_.min_ngram).first->second;
}

// The index of a slot's history, brought up to date.
NgramIndex & PromptLookup::follow(int32_t slot, const std::vector<int32_t> & history) {
    while (histories_.size() <= static_cast<size_t>(slot)) {
        histories_.emplace_back(config_.max_ngram, config_.min_ngram);
    }
    NgramIndex & index = histories_[static_cast<size_t>(slot)];
    const std::vector<int32_t> & held = index.tokens();
    const size_t n = n_staying(0, held.data(), held.size(), history.data(), history.size());
    if (n == 0) {
        index = NgramIndex(config_.max_ngram, config_.min_ngram);
    }
    while (index.tokens().size() > n) {
        index.remove_last();
    }
    for (size_t i = n; i < history.size(); i++) {
        index.append(history[i]);
    }
    return index;
}

void PromptLookup::propose(const DraftRequest & request) {
    const std::vector<int32_t> & history = *request.history;
    const NgramIndex * index = &follow(request.slot, history);
    NgramIndex::Match match =
        index->find(history.data(), history.size(), static_cast<pyfly_lookup_match>(config_.match));
    int32_t proposal_class = std::min(match.n, 4) - 1;
    const auto of_owner = answers_.find(request.owner);
    const bool may_use = of_owner != answers_.end() && !request.is_independent;
    const NgramIndex * answers = may_use ? &of_owner->second : nullptr;
    for (const NgramIndex * other : {answers, static_cast<const NgramIndex *>(&named_)}) {
        if (other == nullptr) {
            continue;
        }
        const NgramIndex::Match found = other->find(history.data(), history.size());
        if (found.n > match.n) {
            index = other;
            match = found;
            proposal_class = found.n < 3 ? 4 : found.n < 8 ? 5 : found.n < 16 ? 6 : 7;
        }
    }
    if (match.next == NgramIndex::none) {
        return;
    }
    const auto first = index->tokens().begin() + match.next;
    const std::ptrdiff_t n_most =
        std::min({index->tokens().end() - first, std::ptrdiff_t{request.n_max}, std::ptrdiff_t{config_.num_pred}});
    request.out->tokens.assign(first, std::find(first, first + n_most, NgramIndex::separator));
    request.out->proposal_class = proposal_class;
    request.out->is_from_answers = index == answers;
}

void PromptLookup::propose(const std::vector<DraftRequest> & requests) {
    for (const DraftRequest & request : requests) {
        propose(request);
    }
}

void PromptLookup::ended(const std::vector<int32_t> & history, size_t n_prompt, int32_t owner) {
    if (n_prompt < history.size()) {
        const size_t begin = n_prompt - std::min(n_prompt, static_cast<size_t>(config_.max_ngram));
        remember(history.data() + begin, history.size() - begin, owner);
    }
}

// A separator stands in the place of a control token, and at the end. Of more than the memory holds, the end is kept.
void PromptLookup::remember(const int32_t * tokens, size_t n, int32_t owner) {
    const size_t n_kept = std::min(n + 1, config_.n_memory);
    if (n_kept < 2) {
        return;
    }
    const auto n_held = [](const auto & one) { return one.second.tokens().size(); };
    size_t n_all = n_kept;
    for (const auto & one : answers_) {
        n_all += n_held(one);
    }
    while (n_all > config_.n_memory) {
        auto & largest = *std::max_element(answers_.begin(), answers_.end(),
                                           [&](const auto & a, const auto & b) { return n_held(a) < n_held(b); });
        const size_t n_removed = std::min(n_held(largest), std::max(n_all - config_.n_memory, n_held(largest) / 2));
        largest.second.remove_first(n_removed);
        n_all -= n_removed;
    }
    NgramIndex & answers = answers_of(owner);
    for (size_t i = n + 1 - n_kept; i < n; i++) {
        const bool is_control = vocabulary_ != nullptr && tokens[i] >= 0 && vocabulary_->is_protected(tokens[i]);
        answers.append(is_control ? NgramIndex::separator : tokens[i]);
    }
    if (answers.tokens().back() != NgramIndex::separator) {
        answers.append(NgramIndex::separator);
    }
}

} // namespace pyfly

extern "C" pyfly_status pyfly_drafter_lookup_new(const pyfly_target * target, const pyfly_lookup_config * config,
                                                 const int32_t * texts, size_t n_texts, const int32_t * answers,
                                                 size_t n_answers, pyfly_drafter ** out, pyfly_error * error) {
    return pyfly::guard(error, [&] {
        *out = new pyfly_drafter{std::make_unique<pyfly::PromptLookup>(
            *config, target == nullptr ? nullptr : &target->vocabulary, std::vector<int32_t>(texts, texts + n_texts),
            std::vector<int32_t>(answers, answers + n_answers))};
    });
}

extern "C" pyfly_status pyfly_drafter_lookup_answers(const pyfly_drafter * drafter, int32_t * out, size_t capacity,
                                                     size_t * n_out, pyfly_error * error) {
    return pyfly::guard(error, [&] {
        const auto * lookup = dynamic_cast<const pyfly::PromptLookup *>(drafter->impl.get());
        if (lookup == nullptr) {
            throw pyfly::Error(PYFLY_STATUS_INVALID, "only prompt lookup remembers answers");
        }
        const std::vector<int32_t> & answers = lookup->answers();
        *n_out = answers.size();
        std::copy_n(answers.begin(), std::min(capacity, answers.size()), out);
    });
}
