#include "markers.h"

#include <algorithm>

namespace pyfly {

Markers::Markers(std::vector<std::string> texts) : texts_(std::move(texts)) {
    for (const std::string & marker : texts_) {
        reach_ = std::max(reach_, marker.size());
    }
}

bool Markers::touch(const std::string & before, const std::string & text) const {
    const std::string all = before + text;
    return std::any_of(texts_.begin(), texts_.end(), [&](const std::string & marker) {
        for (size_t begin = 0; begin < all.size(); begin++) {
            const size_t n = std::min(marker.size(), all.size() - begin);
            if (begin + n > before.size() && all.compare(begin, n, marker, 0, n) == 0) {
                return true;
            }
        }
        return false;
    });
}

} // namespace pyfly
