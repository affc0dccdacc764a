#include "span_groups.h"

#include <algorithm>
#include <map>

namespace pyfly {

std::vector<SpanGroup> group_spans(const std::vector<Span> & spans, size_t n_ubatch, Together together) {
    SpanGroup all(spans.size());
    for (size_t i = 0; i < all.size(); i++) {
        all[i] = i;
    }
    // Caches with a stream for each sequence evaluate neighbouring ones together.
    std::sort(all.begin(), all.end(), [&](size_t a, size_t b) { return spans[a].sequence < spans[b].sequence; });
    if (together == Together::all || spans.size() == 1) {
        return {all};
    }
    std::map<size_t, SpanGroup> by_length;
    for (const size_t i : all) {
        SpanGroup & group = by_length[spans[i].n];
        if (spans[i].n == 1 || group.empty() || (group.size() + 1) * spans[i].n <= n_ubatch) {
            group.push_back(i);
        }
    }
    std::vector<SpanGroup> groups;
    const auto take = [&](const SpanGroup & group) {
        groups.push_back(group);
        all.erase(std::remove_if(all.begin(), all.end(),
                                 [&](size_t i) { return std::find(group.begin(), group.end(), i) != group.end(); }),
                  all.end());
    };
    if (const auto singles = by_length.find(1); singles != by_length.end() && together >= Together::singles) {
        take(singles->second);
        by_length.erase(singles);
    }
    const auto largest = std::max_element(by_length.begin(), by_length.end(), [](const auto & a, const auto & b) {
        return a.second.size() < b.second.size();
    });
    if (largest != by_length.end() && together >= Together::equal) {
        take(largest->second);
    }
    while (!all.empty()) {
        take({all.front()});
    }
    return groups;
}

} // namespace pyfly
