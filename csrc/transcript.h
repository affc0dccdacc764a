// The tokens of one request: committed ones, then provisional ones whose windows are open; their records; rolling back
// and committing. No llama.h.
#pragma once

#include <memory>
#include <vector>

#include "pyfly.h"
#include "sampler.h"
#include "window.h"

namespace pyfly {

class Transcript {
  public:
    // What is kept of every token until the next step: the logits row behind it; the sampler as it was just after it.
    struct Keeps {
        bool rows, samplers;
    };

    // A request of n_vocab tokens begins with these.
    void begin(std::vector<int32_t> history, size_t n_vocab, Keeps keeps);

    // A step begins: the records of the last one go.
    void begin_step();

    // Appends a token. `row`: the raw logits it was taken from, or null; `rejected`: drafts rejected in its place.
    void push(const pyfly_record & record, const float * row, std::vector<int32_t> rejected);

    // Before the sampler moves on: keeps it as it is after the last token, where samplers are kept.
    void keep_sampler(const Sampler & sampler);

    // The token that comes next is a deferred mismatch. `choice`: the record of the target's own choice in its place;
    // `sampler`: as it was just after that choice was accepted.
    void defer(const pyfly_record & choice, std::unique_ptr<Sampler> sampler);

    // Forgets what is only needed to roll back to mismatches that are decided now.
    void forget_decided(const Window & window);

    // Takes back every token from the rejected mismatch on and puts the target's choice in its place; returns the
    // sampler as it was just after that. `rolled_back` receives how many tokens went, `choice` the new record.
    std::unique_ptr<Sampler> roll_back(const Window::Rejection & rejection, int64_t & rolled_back,
                                       pyfly_record & choice);

    // Takes back every token behind the first n; no window is open there.
    void take_back(size_t n);

    // Gives out every token before position `end` for good: they become records(). Counts them.
    void commit(int64_t end, pyfly_stats & stats);

    // The step failed: tokens behind the first n go, and so do the records.
    void abandon(size_t n);

    // Of what the last step committed, only tokens before position `end` were given to the caller: the others are not
    // counted any more.
    void uncount(int64_t end, pyfly_stats & stats) const;

    // The request ends: provisional tokens are not given out any more, samplers may go.
    void end();

    const std::vector<int32_t> & history() const { return history_; }
    size_t n() const { return history_.size(); }
    size_t n_committed() const {
        return pending_.empty() ? history_.size() : static_cast<size_t>(pending_.front().record.position);
    }

    // Of the last step.
    const std::vector<pyfly_record> & records() const { return records_; }
    const std::vector<int32_t> & rejected() const { return rejected_; }
    const float * row(size_t i) const; // raw row behind record i; null if rows are not kept

    // Takes the sampler as it was just after record i; null if it is as it was, or samplers are not kept.
    std::unique_ptr<Sampler> take_sampler(size_t i) { return std::move(samplers_[i]); }

  private:
    // A token whose fate may still be open.
    struct Pending {
        pyfly_record record;
        std::vector<int32_t> rejected;
        std::vector<float> row;
        std::unique_ptr<Sampler> sampler; // null while it still is so
    };

    // A deferred mismatch whose window is open.
    struct Open {
        pyfly_record choice;
        std::unique_ptr<Sampler> sampler;
    };

    std::vector<int32_t> history_;
    size_t n_vocab_ = 0;
    Keeps keeps_ = {false, false};
    std::vector<Pending> pending_;
    std::vector<Open> open_;
    std::vector<pyfly_record> records_;
    std::vector<int32_t> rejected_;
    std::vector<std::vector<float>> rows_;
    std::vector<std::unique_ptr<Sampler>> samplers_;
};

} // namespace pyfly
