// A llama_vocab as a Tokenizer.
#pragma once

#include <string>
#include <vector>

#include "llama.h"
#include "tokenizer.h"

namespace pyfly {

class LlamaTokenizer : public Tokenizer {
  public:
    // The vocabulary is borrowed; `who` names it in errors. Throws Error(PYFLY_STATUS_INCOMPATIBLE) for one that has no
    // text for its tokens, or does not give back the text it is given (it has only lower case, say).
    LlamaTokenizer(const llama_vocab * vocab, const std::string & who);

    int32_t n() const override { return static_cast<int32_t>(pieces_.size()); }
    const std::string & piece(int32_t token) const override { return pieces_[static_cast<size_t>(token)]; }
    const std::string & control(int32_t token) const override { return controls_[static_cast<size_t>(token)]; }
    int32_t begin() const override;
    int32_t end() const override;
    bool is_end(int32_t token) const override { return llama_vocab_is_eog(vocab_, token); }
    std::vector<int32_t> tokenize(const std::string & text) const override;

  private:
    std::vector<int32_t> tokenize_raw(const std::string & text) const;
    bool gives_back(const std::string & text) const;

    const llama_vocab * vocab_;
    std::vector<std::string> pieces_, controls_;
    std::string guard_; // put before a text, so that no space is
};

} // namespace pyfly
