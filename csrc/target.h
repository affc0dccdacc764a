// What the engine needs of a target model. No llama.h: llama_target.* is the real one, scripted_target.* serves tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pyfly {

class Target {
  public:
    virtual ~Target() = default;

    virtual int32_t n_vocab() const = 0;
    virtual int32_t n_ctx() const = 0;   // positions a sequence can hold
    virtual int32_t n_batch() const = 0; // most tokens in one evaluate()

    // Evaluates tokens[n] at positions n_past, n_past + 1, ...; the memory holds exactly n_past positions before.
    // Logits are produced for the tokens from index `first_row` on. Throws Error; then the memory holds n_past
    // positions as before.
    virtual void evaluate(const int32_t * tokens, size_t n, int32_t n_past, size_t first_row) = 0;

    // Logits row [n_vocab] that follows the token at index i >= first_row of the last evaluate(). Valid until the next.
    virtual const float * row(size_t i) = 0;

    // Forgets every position >= n. Throws Error if that is not possible.
    virtual void truncate(int32_t n) = 0;

    // Whether truncate() can take back positions that were evaluated one or more batches ago. Where it cannot, the
    // engine does not speculate.
    virtual bool can_rewind() const = 0;

    bool is_protected(int32_t token) const { return protected_[static_cast<size_t>(token)]; }
    bool is_eog(int32_t token) const { return eog_[static_cast<size_t>(token)]; }
    void protect(int32_t token) { protected_[static_cast<size_t>(token)] = true; }

    // A token that ends a text is protected too.
    void mark_eog(int32_t token) {
        eog_[static_cast<size_t>(token)] = true;
        protect(token);
    }

  protected:
    explicit Target(int32_t n_vocab)
        : protected_(static_cast<size_t>(n_vocab), false), eog_(static_cast<size_t>(n_vocab), false) {}

  private:
    std::vector<bool> protected_;
    std::vector<bool> eog_;
};

} // namespace pyfly
