// How the target's choice is made from a row. No llama.h: chain_sampler.* drives a request's own llama.cpp chain.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "distribution.h"

namespace pyfly {

// What a sampler draws from. Like choose(), these leave the token history alone.
class Distributions {
  public:
    virtual ~Distributions() = default;

    // The distribution of the target's choice for a row, in place of choose(): its random state stays. Throws
    // Error(PYFLY_STATUS_NOT_FINITE) for a row without a distribution.
    virtual Weights of_target(const float * row, size_t n_vocab) = 0;

    // A drafter's row, truncated and scaled as the target's is (top-k, top-p, min-p, temperature, ...), so that what is
    // drawn from it is accepted often. The row [n], of the first n tokens, has a distribution. Throws as of_target does
    // where nothing of that is left.
    virtual Weights of_draft(const float * row, size_t n) = 0;

    // The request's seed.
    virtual uint64_t seed() const = 0;
};

class Sampler {
  public:
    virtual ~Sampler() = default;

    // The target's choice t_i for a row. Changes the random state (and mirostat's), not the token history.
    // Throws Error(PYFLY_STATUS_NOT_FINITE) for a row without a distribution.
    virtual int32_t choose(const float * row, size_t n_vocab) = 0;

    // The row of the last choose() as gates see it: after everything that forbids or reweighs tokens (processors,
    // biases, penalties, grammar), before temperature and truncation. Asked for before accept(); valid until choose().
    virtual const float * shaped_row() = 0;

    // What it draws from; null where its choice is an argmax. Valid as long as it is.
    virtual Distributions * distributions() { return nullptr; }

    // Whether the last choose() could have drawn `token`: it survived the truncation (top-k, top-p, min-p, ...).
    // Always true when the choice is the argmax.
    virtual bool could_draw(int32_t token) const = 0;

    // Appends a token to the history that penalties, grammar and the like look at.
    virtual void accept(int32_t token) = 0;

    // A copy with the same random state and history.
    virtual std::unique_ptr<Sampler> clone() const = 0;
};

// The argmax of the row as it is.
class GreedySampler : public Sampler {
  public:
    int32_t choose(const float * row, size_t n_vocab) override;
    const float * shaped_row() override { return row_; }
    bool could_draw(int32_t) const override { return true; }
    void accept(int32_t) override {}
    std::unique_ptr<Sampler> clone() const override { return std::make_unique<GreedySampler>(*this); }

  private:
    const float * row_ = nullptr;
};

// The Sampler for a request's llama_sampler chain, or a GreedySampler for null. `keeps_shaped_row`: whether
// shaped_row() will be asked for; `gives_distributions`: whether distributions() will, and then a chain that draws in a
// way of its own is an Error(PYFLY_STATUS_INVALID). Defined in chain_sampler.cpp; builds without llama.cpp have
// sampler_without_llama.cpp.
std::unique_ptr<Sampler> make_sampler(const void * llama_sampler_chain, bool keeps_shaped_row,
                                      bool gives_distributions);

} // namespace pyfly
