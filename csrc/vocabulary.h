// What the core knows of the target's tokens: which must not be replaced loosely, which end a text, and their texts. No
// llama.h.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "markers.h"

namespace pyfly {

// What a token stands for.
struct Piece {
    std::string text; // bytes: a character may go on in the next token
    bool is_control;  // it is no text
};

class Vocabulary {
  public:
    explicit Vocabulary(int32_t n) : protected_(static_cast<size_t>(n), false), eog_(static_cast<size_t>(n), false) {}

    int32_t n() const { return static_cast<int32_t>(eog_.size()); }
    bool is_protected(int32_t token) const { return protected_[static_cast<size_t>(token)]; }
    bool is_eog(int32_t token) const { return eog_[static_cast<size_t>(token)]; }
    void protect(int32_t token) { protected_[static_cast<size_t>(token)] = true; }

    // The texts of tokens; without them every text is empty.
    void set_pieces(std::function<Piece(int32_t)> pieces) { pieces_ = std::move(pieces); }
    Piece piece(int32_t token) const { return pieces_ ? pieces_(token) : Piece{{}, false}; }

    // Texts, none of them empty, that no token may begin or continue loosely.
    void set_markers(std::vector<std::string> texts) { markers_ = Markers(std::move(texts)); }

    // Whether `token` does so behind these.
    bool writes_marker(const std::vector<int32_t> & history, int32_t token) const {
        std::string before; // since the last control token
        for (size_t i = history.size(); i-- > 0 && before.size() < markers_.reach();) {
            const Piece piece = this->piece(history[i]);
            if (piece.is_control) {
                break;
            }
            before.insert(0, piece.text);
        }
        return markers_.reach() > 0 && markers_.touch(before, piece(token).text);
    }

    // A token that ends a text is protected too.
    void mark_eog(int32_t token) {
        eog_[static_cast<size_t>(token)] = true;
        protect(token);
    }

  private:
    std::vector<bool> protected_;
    std::vector<bool> eog_;
    std::function<Piece(int32_t)> pieces_;
    Markers markers_;
};

} // namespace pyfly
