// A vocabulary as a way from tokens to text and back. No llama.h: llama/llama_tokenizer.* is the real one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pyfly {

class Tokenizer {
  public:
    virtual ~Tokenizer() = default;

    virtual int32_t n() const = 0;

    // The bytes that a token stands for, which need not be whole characters; empty for control tokens.
    virtual const std::string & piece(int32_t token) const = 0;

    // How a control token is written, such as <|im_end|>; empty for tokens that stand for text.
    virtual const std::string & control(int32_t token) const = 0;

    // Control tokens, -1: none. begin: what every text begins with. end: of a turn, or else of a text.
    virtual int32_t begin() const = 0;
    virtual int32_t end() const = 0;
    virtual bool is_end(int32_t token) const = 0;

    // The tokens of valid UTF-8 text that goes on in the middle of a text. What looks like a control token is text.
    virtual std::vector<int32_t> tokenize(const std::string & text) const = 0;
};

} // namespace pyfly
