// Markers of a chat that ordinary tokens write, such as [INST] or ### Response:. No llama.h.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace pyfly {

class Markers {
  public:
    Markers() = default;
    explicit Markers(std::vector<std::string> texts);

    // Bytes before a token that can matter; 0: there are no markers.
    size_t reach() const { return reach_; }

    // Whether bytes of `text` that follow `before` belong to a marker, or to the beginning of one that `text` ends in.
    bool touch(const std::string & before, const std::string & text) const;

  private:
    std::vector<std::string> texts_;
    size_t reach_ = 0;
};

} // namespace pyfly
