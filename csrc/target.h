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

    // Forgets every position >= n and returns how many are left: n, or fewer where the memory cannot go back to exactly
    // n (recurrent states, pruned sliding windows) or held fewer. The caller evaluates the tokens in between again.
    virtual int32_t truncate(int32_t n) = 0;

    // How many of the tokens of the last evaluate(), never all of them, truncate() can take back exactly.
    // unlimited: any number, of any evaluate(), save where a sliding window has moved on.
    static constexpr int32_t unlimited = INT32_MAX;
    virtual int32_t rewind_depth() const { return unlimited; }

    // Where the depth is limited: keeps the present state, so that truncate(m) leaves at least the positions of now for
    // every later m >= them. One state is kept, the latest. False if the memory cannot do that.
    virtual bool checkpoint() { return true; }
    virtual void forget_checkpoint() {}

    virtual bool can_checkpoint() const { return true; }

    // Whether position n, which truncate() can go back to now, will still be within reach when n_more tokens have been
    // evaluated, if need be by way of a checkpoint made now. A guess where the memory decides that as it goes (sliding
    // windows); truncate() itself never guesses.
    virtual bool can_return(int32_t n, int32_t n_more) const {
        (void) n, (void) n_more;
        return rewind_depth() == unlimited || can_checkpoint();
    }

    // Whether positions can be taken back at all. Where they cannot, the engine does not speculate.
    bool can_rewind() const { return rewind_depth() > 0 || can_checkpoint(); }

    // Somebody else may use the memory now: it holds what the last truncate() left.
    virtual void settle() {}

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
