#include "cross_vocabulary.h"

#include <algorithm>
#include <cmath>

#include "error.h"
#include "guard.h"
#include "utf8.h"

namespace pyfly {

namespace {

constexpr size_t n_extra = 2; // steps after which a draft may still be shorter than is asked for

} // namespace

CrossVocabulary::CrossVocabulary(std::unique_ptr<Tokenizer> target, std::unique_ptr<Tokenizer> draft,
                                 std::unique_ptr<Drafter> inner)
    : target_(std::move(target)), draft_(std::move(draft)), inner_(std::move(inner)), to_draft_(*target_, *draft_),
      to_target_(*draft_, *target_) {
    for (int32_t token = 0; token < target_->n(); token++) {
        const std::string & piece = target_->piece(token);
        if (!piece.empty() && piece.size() < 4 && std::none_of(piece.begin(), piece.end(), begins_utf8)) {
            ends_of_characters_.emplace(piece, token);
        }
    }
}

std::vector<int32_t> CrossVocabulary::usual_text() const {
    return target_->tokenize(
        "The river was high after the rain, so they took the long way home. When they came to the");
}

Translation & CrossVocabulary::sync(int32_t slot, const std::vector<int32_t> & history) const {
    while (translations_.size() <= static_cast<size_t>(slot)) {
        translations_.emplace_back(*target_, *draft_, to_draft_);
    }
    Translation & translation = translations_[static_cast<size_t>(slot)];
    translation.sync(history);
    return translation;
}

const std::vector<int32_t> & CrossVocabulary::translate(int32_t slot, const std::vector<int32_t> & history) {
    return sync(slot, history).tokens();
}

size_t CrossVocabulary::n_behind(int32_t slot, const std::vector<int32_t> & history) const {
    const std::vector<int32_t> & tokens = sync(slot, history).tokens();
    return tokens.empty() ? 0 : inner_->n_behind(slot, tokens);
}

size_t CrossVocabulary::prepare(int32_t slot, const std::vector<int32_t> & history, size_t n_most) {
    const std::vector<int32_t> & tokens = sync(slot, history).tokens();
    return tokens.empty() ? 0 : inner_->prepare(slot, tokens, n_most);
}

void CrossVocabulary::share(int32_t from, int32_t to, const std::vector<int32_t> & history) {
    const std::vector<int32_t> & tokens = sync(to, history).tokens();
    if (!tokens.empty()) {
        inner_->share(from, to, tokens);
    }
}

// Tokens of its own to be drafted now: for what is asked for at first, then one after the other.
size_t CrossVocabulary::n_more(const Job & job) const {
    const size_t n_drafted = job.history.size() - job.begin;
    const double wanted = std::ceil(static_cast<double>(job.request.n_max) * job.ratio);
    const size_t n_wanted = static_cast<size_t>(wanted);
    return n_drafted < n_wanted ? n_wanted - n_drafted : n_drafted < n_wanted + n_extra ? 1 : 0;
}

void CrossVocabulary::propose(const std::vector<DraftRequest> & requests) {
    std::vector<Job> jobs;
    std::vector<Job *> active;
    for (const DraftRequest & request : requests) {
        const Translation & translation = sync(request.slot, *request.history);
        jobs.push_back(
            {request, translation.tail(), translation.ratio(), translation.tokens(), translation.tokens().size()});
    }
    for (Job & job : jobs) {
        if (job.begin > 0) {
            active.push_back(&job);
        }
    }
    while (!active.empty()) {
        std::vector<DraftRequest> asked;
        for (Job * job : active) {
            job->made = {};
            asked.push_back({job->request.slot, &job->history, static_cast<int32_t>(n_more(*job)), &job->made});
            if (job->request.stop) {
                asked.back().stop = [job](double p) {
                    const DraftStep step = job->request.stop(p);
                    job->has_ended = step != DraftStep::goes_on;
                    return step;
                };
            }
        }
        inner_->propose(asked);
        for (size_t i = 0; i < active.size(); i++) {
            Job & job = *active[i];
            job.is_done = job.has_ended || job.made.tokens.size() < static_cast<size_t>(asked[i].n_max);
            job.own.insert(job.own.end(), job.made.confidence.begin(), job.made.confidence.end());
            job.history.insert(job.history.end(), job.made.tokens.begin(), job.made.tokens.end());
            convert(job);
            job.is_done = job.is_done || n_more(job) == 0;
        }
        active.erase(std::remove_if(active.begin(), active.end(), [](const Job * job) { return job->is_done; }),
                     active.end());
    }
    for (Job & job : jobs) {
        job.tokens.resize(std::min(job.tokens.size(), static_cast<size_t>(job.request.n_max)));
        if (!job.own.empty()) {
            weigh(job);
        }
        job.request.out->tokens = std::move(job.tokens);
    }
}

// The confidence in the target's tokens of a draft, and in the one that it ended before.
void CrossVocabulary::weigh(Job & job) const {
    Proposal & out = *job.request.out;
    size_t n_used = 0, own_end = 0, end = job.tail.size();
    const auto use = [&] {
        own_end += draft_->piece(job.history[job.begin + n_used]).size();
        return static_cast<double>(job.own[n_used++]);
    };
    const size_t n_own = job.history.size() - job.begin;
    for (const int32_t token : job.tokens) {
        const size_t n_bytes = target_->piece(token).size();
        end += n_bytes;
        double p = n_bytes == 0 && n_used < n_own ? use() : 1.0; // a control token
        while (n_used < n_own && own_end < end) {
            p *= use();
        }
        out.confidence.push_back(static_cast<float>(p));
    }
    if (job.made.dropped < 0 || n_used < n_own) {
        return;
    }
    out.confidence.push_back(job.own.back());
    const std::vector<int32_t> kept = job.tokens;
    job.history.push_back(job.made.dropped);
    convert(job);
    if (job.tokens.size() > kept.size() && std::equal(kept.begin(), kept.end(), job.tokens.begin())) {
        out.dropped = job.tokens[kept.size()];
    }
    job.tokens = kept;
}

// The target's tokens for what is drafted so far. Done when there are more than enough, or no more can come.
void CrossVocabulary::convert(Job & job) const {
    std::string text, tail;
    int32_t control = -1;
    bool has_control = false;
    for (size_t i = job.begin; i < job.history.size() && !has_control; i++) {
        append_utf8(text, tail, draft_->piece(job.history[i]));
        has_control = !draft_->control(job.history[i]).empty();
        control = has_control ? to_target_[job.history[i]] : -1;
    }
    job.tokens.clear();
    size_t begin = 0;
    if (!job.tail.empty() && !text.empty()) {
        while (++begin < text.size() && !begins_utf8(text[begin])) {
        }
        if (begin <= job.tail.size() || text.compare(0, job.tail.size(), job.tail) != 0 ||
            !finish_character(text.substr(job.tail.size(), begin - job.tail.size()), job.tokens)) {
            job.tokens.clear();
            job.is_done = true;
            return;
        }
    }
    const std::vector<int32_t> more = target_->tokenize(text.substr(begin));
    job.tokens.insert(job.tokens.end(), more.begin(), more.end());
    if (control >= 0 && tail.empty()) {
        job.tokens.push_back(control);
    }
    job.is_done = job.is_done || has_control || job.tokens.size() > static_cast<size_t>(job.request.n_max);
}

// The last bytes of a character in as few tokens as it takes. False where the target has none for them.
bool CrossVocabulary::finish_character(const std::string & rest, std::vector<int32_t> & out) const {
    for (size_t at = 0, n = 0; at < rest.size(); at += n) {
        auto found = ends_of_characters_.end();
        for (n = rest.size() - at; n > 0 && found == ends_of_characters_.end();) {
            found = ends_of_characters_.find(rest.substr(at, n));
            n -= found == ends_of_characters_.end() ? 1 : 0;
        }
        if (n == 0) {
            return false;
        }
        out.push_back(found->second);
    }
    return true;
}

} // namespace pyfly

extern "C" pyfly_status pyfly_drafter_translate(pyfly_drafter * drafter, const int32_t * history, size_t n_history,
                                                int32_t * out, size_t capacity, size_t * n_out, pyfly_error * error) {
    return pyfly::guard(error, [&] {
        auto * cross = dynamic_cast<pyfly::CrossVocabulary *>(drafter->impl.get());
        if (cross == nullptr) {
            throw pyfly::Error(PYFLY_STATUS_INVALID, "this drafter has no vocabulary of its own");
        }
        const std::vector<int32_t> & tokens = cross->translate(0, {history, history + n_history});
        std::copy_n(tokens.begin(), std::min(capacity, tokens.size()), out);
        *n_out = tokens.size();
    });
}
