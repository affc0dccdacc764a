#include "llama_tokenizer.h"

#include "error.h"
#include "pyfly.h"

namespace pyfly {

namespace {

// Letters of both cases, digits, spaces, a line, and characters of two, three and four bytes.
constexpr const char * sample = "Ab 12,  c\nd\xC3\xA9 \xE6\xBC\xA2 \xF0\x9F\x99\x82";

std::string piece_of(const llama_vocab * vocab, int32_t token) {
    std::string piece(16, '\0');
    for (int32_t look = 0; look < 2; look++) {
        const int32_t n =
            llama_token_to_piece(vocab, token, &piece[0], static_cast<int32_t>(piece.size()), /*lstrip=*/0, false);
        piece.resize(static_cast<size_t>(n < 0 ? -n : n));
        if (n >= 0) {
            break;
        }
    }
    return piece;
}

} // namespace

LlamaTokenizer::LlamaTokenizer(const llama_vocab * vocab, const std::string & who) : vocab_(vocab) {
    if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE) {
        throw Error(PYFLY_STATUS_INCOMPATIBLE,
                    "the " + who + " has no text for its tokens, so CrossVocabulary cannot go by it");
    }
    for (int32_t token = 0; token < llama_vocab_n_tokens(vocab); token++) {
        pieces_.push_back(piece_of(vocab, token));
        const bool is_control = (llama_vocab_get_attr(vocab, token) & LLAMA_TOKEN_ATTR_CONTROL) != 0;
        controls_.emplace_back(is_control ? llama_vocab_get_text(vocab, token) : "");
    }
    // SentencePiece puts a space before every text; a line before it, which is a token of its own, takes that.
    for (const char * guard : {"", "\n"}) {
        guard_ = guard;
        if (gives_back(sample)) {
            return;
        }
    }
    throw Error(PYFLY_STATUS_INCOMPATIBLE,
                "the vocabulary of the " + who +
                    " does not give back the text that it is given, so CrossVocabulary cannot go by it; use "
                    "another model");
}

int32_t LlamaTokenizer::begin() const {
    return llama_vocab_get_add_bos(vocab_) ? llama_vocab_bos(vocab_) : LLAMA_TOKEN_NULL;
}

int32_t LlamaTokenizer::end() const {
    const int32_t end_of_turn = llama_vocab_eot(vocab_);
    return end_of_turn != LLAMA_TOKEN_NULL ? end_of_turn : llama_vocab_eos(vocab_);
}

bool LlamaTokenizer::gives_back(const std::string & text) const {
    std::string back;
    for (const int32_t token : tokenize(text)) {
        back += piece(token);
    }
    return back == text;
}

std::vector<int32_t> LlamaTokenizer::tokenize_raw(const std::string & text) const {
    std::vector<int32_t> tokens(text.size() + 2);
    const int32_t n = llama_tokenize(vocab_, text.data(), static_cast<int32_t>(text.size()), tokens.data(),
                                     static_cast<int32_t>(tokens.size()), /*add_special=*/false,
                                     /*parse_special=*/false);
    tokens.resize(static_cast<size_t>(n < 0 ? 0 : n));
    return tokens;
}

std::vector<int32_t> LlamaTokenizer::tokenize(const std::string & text) const {
    if (text.empty()) {
        return {};
    }
    std::vector<int32_t> tokens = tokenize_raw(guard_ + text);
    const std::string expected = guard_.empty() ? "" : " " + guard_;
    std::string before;
    size_t n = 0;
    while (before.size() < expected.size() && n < tokens.size()) {
        before += piece(tokens[n++]);
    }
    if (before != expected) {
        return tokenize_raw(text);
    }
    tokens.erase(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(n));
    return tokens;
}

} // namespace pyfly
