// A text of the target's tokens in the tokens of a draft model with another vocabulary. No llama.h.
#pragma once

#include <vector>

#include "tokenizer.h"

namespace pyfly {

// Which token of one vocabulary stands for a control token of the other: one that is written alike, or has the same
// part (the end of a turn); -1: none.
class ControlTokens {
  public:
    ControlTokens(const Tokenizer & from, const Tokenizer & to);
    int32_t operator[](int32_t token) const { return to_[static_cast<size_t>(token)]; }

  private:
    std::vector<int32_t> to_;
};

// The draft's tokens give the bytes of the text, up to a character that is not whole yet; what is no UTF-8 is U+FFFD
// there. When the text grows or is taken back, only the end of it is tokenised again, from a place on at which words
// begin, so that nearly all of the draft's tokens stay what they were.
class Translation {
  public:
    // Borrowed.
    Translation(const Tokenizer & from, const Tokenizer & to, const ControlTokens & controls)
        : from_(&from), to_(&to), controls_(&controls) {}

    // Makes the text this one.
    void sync(const std::vector<int32_t> & history);

    // The text in the draft's tokens.
    const std::vector<int32_t> & tokens() const { return tokens_; }

    // The first bytes (at most 3) of a character at the end of the text that is not whole yet; they are not in
    // tokens().
    const std::string & tail() const { return now_.tail; }

    // Of the draft's tokens for one of the target's, in this text.
    double ratio() const;

  private:
    // The text up to some token of the target.
    struct Mark {
        size_t n_bytes = 0, n_controls = 0;
        std::string tail = {};
    };
    // A control token of the draft within the text.
    struct Control {
        size_t at; // byte
        int32_t token;
    };
    // Up to a token of the draft.
    struct End {
        size_t n_bytes, n_controls; // n_bytes unknown: what was made of the text does not give it back
    };

    void cut(const Mark & mark);
    bool can_begin_at(const End & end) const;
    void tokenize(size_t n_bytes);

    const Tokenizer * from_;
    const Tokenizer * to_;
    const ControlTokens * controls_;
    std::vector<int32_t> seen_; // of the target
    std::vector<Mark> marks_;   // behind each of them
    Mark now_;
    std::string text_; // valid UTF-8
    std::vector<Control> text_controls_;
    std::vector<int32_t> tokens_;
    std::vector<End> ends_; // behind each of them
};

} // namespace pyfly
