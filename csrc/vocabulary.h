// What the core knows of the target's tokens: which must not be replaced loosely and which end a text. No llama.h.
#pragma once

#include <cstdint>
#include <vector>

namespace pyfly {

class Vocabulary {
  public:
    explicit Vocabulary(int32_t n) : protected_(static_cast<size_t>(n), false), eog_(static_cast<size_t>(n), false) {}

    int32_t n() const { return static_cast<int32_t>(eog_.size()); }
    bool is_protected(int32_t token) const { return protected_[static_cast<size_t>(token)]; }
    bool is_eog(int32_t token) const { return eog_[static_cast<size_t>(token)]; }
    void protect(int32_t token) { protected_[static_cast<size_t>(token)] = true; }

    // A token that ends a text is protected too.
    void mark_eog(int32_t token) {
        eog_[static_cast<size_t>(token)] = true;
        protect(token);
    }

  private:
    std::vector<bool> protected_;
    std::vector<bool> eog_;
};

} // namespace pyfly
