// A drafter with another vocabulary than the target's: what it drafts is taken as text. No llama.h.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "drafter.h"
#include "tokenizer.h"
#include "translation.h"

namespace pyfly {

// It sees the text in its own tokens (Translation), drafts in them, and the text of its draft is tokenised for the
// target as it goes on, not together with what the target has already said: tokens that join the two cannot come any
// more. A character that the target has said in part is finished in tokens of its last bytes, if the draft begins with
// that very character. The last token of a draft that ends in the middle of a word would often be another one if the
// word went on, so a little more is drafted than is asked for, and what is too much is dropped.
//
// Its drafts have no rows in the target's vocabulary. A stop is asked of each token of its own. The confidence
// in a token of the target's is the product of those in its own tokens that it needs.
class CrossVocabulary : public Drafter {
  public:
    // `inner` drafts in the vocabulary `draft`.
    CrossVocabulary(std::unique_ptr<Tokenizer> target, std::unique_ptr<Tokenizer> draft,
                    std::unique_ptr<Drafter> inner);

    int32_t n_slots() const override { return inner_->n_slots(); }
    size_t prepare(int32_t slot, const std::vector<int32_t> & history, size_t n_most) override;
    size_t n_behind(int32_t slot, const std::vector<int32_t> & history) const override;
    void forget(int32_t slot) override { inner_->forget(slot); }
    void share(int32_t from, int32_t to, const std::vector<int32_t> & history) override;
    void propose(const std::vector<DraftRequest> & requests) override;
    std::vector<int32_t> usual_text() const override; // of others it needs many of its tokens for one of the target's
    double expected_cost() const override { return inner_->expected_cost(); }
    int64_t n_evaluated() const override { return inner_->n_evaluated(); }

    // A slot's history as the inner drafter sees it; valid until the slot is asked for again. A character
    // at its end that is not whole yet is left out.
    const std::vector<int32_t> & translate(int32_t slot, const std::vector<int32_t> & history);

  private:
    // A draft under way.
    struct Job {
        const DraftRequest & request;
        std::string tail;             // of the text: bytes of a character that is not whole
        double ratio;                 // of the draft's tokens for one of the target's
        std::vector<int32_t> history; // in the draft's tokens, with what it has drafted
        size_t begin;                 // of its draft
        Proposal made = {};           // of the inner drafter, last
        std::vector<float> own = {};  // confidence in its own tokens
        bool has_ended = false;       // by the stop
        std::vector<int32_t> tokens = {};
        bool is_done = false;
    };

    Translation & sync(int32_t slot, const std::vector<int32_t> & history) const;
    size_t n_more(const Job & job) const;
    void convert(Job & job) const;
    void weigh(Job & job) const;
    bool finish_character(const std::string & rest, std::vector<int32_t> & out) const;

    std::unique_ptr<Tokenizer> target_, draft_;
    std::unique_ptr<Drafter> inner_;
    ControlTokens to_draft_, to_target_;
    std::unordered_map<std::string, int32_t> ends_of_characters_; // tokens of the target
    // By slot, of what was seen last; any other history makes them what that asks for.
    mutable std::vector<Translation> translations_;
};

} // namespace pyfly
