#include "regions.h"

#include <cstring>
#include <limits>

namespace pyfly {

namespace {

struct Marker {
    const char * open;
    const char * close; // null: the end of the message
    bool is_tool;       // or it is a thought
};

// They begin with a character that they do not have again: where one breaks off, only its last character may begin
// another.
constexpr Marker markers[] = {
    {"<think>", "</think>", false},         {"<thinking>", "</thinking>", false},
    {"<reasoning>", "</reasoning>", false}, {"[THINK]", "[/THINK]", false},
    {"<tool_call>", "</tool_call>", true},  {"<function_call>", "</function_call>", true},
    {"<function=", "</function>", true},    {"<|tool_call_start|>", "<|tool_call_end|>", true},
    {"<|python_tag|>", nullptr, true},      {"[TOOL_CALLS]", nullptr, true},
};
constexpr size_t n_markers = 2 * sizeof(markers) / sizeof(*markers); // at most 32: they have a bit each

// Even numbers open, odd ones close; empty: there is none.
const char * marker_text(size_t i) {
    const char * text = i % 2 == 0 ? markers[i / 2].open : markers[i / 2].close;
    return text == nullptr ? "" : text;
}

bool is_blank(char c) {
    return c == ' ' || c == '\t' || c == '\r';
}

bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

bool is_one_of(char c, const char * set) {
    return c != '\0' && std::strchr(set, c) != nullptr;
}

constexpr const char * operators = "=+-*/%<>";

// Whether an operator behind `c` is numbers; `was`: whether it would be before it.
bool is_behind_number(bool was, char c) {
    return is_digit(c) || (was && is_one_of(c, "=+-*/%<>.,$()[] \t"));
}

// Of these markers, a bit each, those whose byte `at` is `c`.
uint32_t continued(uint32_t among, uint8_t at, char c) {
    uint32_t out = 0;
    for (size_t i = 0; i < n_markers; i++) {
        out |= (among >> i & 1) != 0 && c != '\0' && marker_text(i)[at] == c ? uint32_t{1} << i : 0;
    }
    return out;
}

void count(uint16_t & run) {
    run = run < std::numeric_limits<uint16_t>::max() ? static_cast<uint16_t>(run + 1) : run;
}

} // namespace

void RegionState::read(const Piece & piece) {
    if (!piece.is_control) {
        for (const char c : piece.text) {
            read(c);
        }
        return;
    }
    size_t marker = piece.text.empty() ? n_markers : 0; // a closing marker that is missing has no text either
    while (marker < n_markers && piece.text != marker_text(marker)) {
        marker++;
    }
    if (marker < n_markers) {
        take_marker(marker, true);
    } else {
        *this = {};
    }
    n_marker_ = 0;
    is_behind_number_ = false;
}

void RegionState::read(char c) {
    is_behind_number_ = is_behind_number(is_behind_number_, c);
    if (tool_ == 0) {
        if (is_fence_line_) {
            read_fence_line(c);
        } else if (fence_ != 0) {
            read_block(c);
        } else {
            read_text(c);
        }
    }
    read_marker(c);
}

// On the line that opens a fence, behind its third character.
void RegionState::read_fence_line(char c) {
    if (c == '\n') {
        is_fence_line_ = false;
        line_ = Line::blank;
        run_ = 0;
    } else if (c != fence_) {
        line_ = Line::more;
    } else if (line_ == Line::run) {
        count(n_fence_);
    } else if (fence_ == '`') { // a code span
        n_span_ = n_fence_;
        run_ = 1;
        run_char_ = '`';
        fence_ = 0;
        is_fence_line_ = false;
    }
}

// In a fenced block.
void RegionState::read_block(char c) {
    if (c == '\n') {
        if (run_ >= n_fence_ && line_ != Line::more) {
            fence_ = 0;
        }
        line_ = Line::blank;
        run_ = 0;
    } else if (c == fence_ && (line_ == Line::blank || line_ == Line::run)) {
        line_ = Line::run;
        count(run_);
    } else if (!is_blank(c)) {
        line_ = Line::more;
    } else if (line_ == Line::run) {
        line_ = Line::behind_run;
    }
}

// Outside of fenced blocks.
void RegionState::read_text(char c) {
    if (c == '\n') {
        end_blocks();
        return;
    }
    if (line_ == Line::blank && (c == '`' || c == '~')) {
        line_ = Line::run;
        run_char_ = c;
        run_ = 1;
        return;
    }
    if (line_ == Line::run && c == run_char_) {
        count(run_);
        if (run_ == 3) {
            fence_ = c;
            n_fence_ = run_;
            is_fence_line_ = true;
        }
        return;
    }
    if (line_ != Line::blank || !is_blank(c)) {
        line_ = Line::more;
    }
    if (c == '`') {
        run_ = run_char_ == '`' ? run_ : 0;
        run_char_ = '`';
        count(run_);
    } else if (run_ > 0) {
        if (run_char_ == '`') {
            n_span_ = n_span_ == 0 ? run_ : n_span_ == run_ ? uint16_t{0} : n_span_;
        }
        run_ = 0;
    }
}

void RegionState::read_marker(char c) {
    markers_ = n_marker_ > 0 ? continued(markers_, n_marker_, c) : 0;
    if (markers_ == 0) {
        n_marker_ = 0;
        markers_ = c == '<' || c == '[' ? continued(~uint32_t{0}, 0, c) : 0;
    }
    if (markers_ == 0) {
        return;
    }
    n_marker_++;
    for (size_t i = 0; i < n_markers; i++) {
        if ((markers_ >> i & 1) != 0 && marker_text(i)[n_marker_] == '\0') {
            n_marker_ = 0;
            take_marker(i, false);
            return;
        }
    }
}

void RegionState::take_marker(size_t marker, bool is_control) {
    const uint8_t number = static_cast<uint8_t>(marker / 2 + 1);
    const bool opens = marker % 2 == 0, is_tool = markers[marker / 2].is_tool;
    if (opens ? tool_ != 0 || (!is_tool && think_ != 0) || (is_code() && !is_control)
              : (is_tool ? tool_ : think_) != number || (!is_tool && tool_ != 0)) {
        return;
    }
    (is_tool ? tool_ : think_) = opens ? number : uint8_t{0};
    end_blocks();
}

void RegionState::end_blocks() {
    fence_ = 0;
    is_fence_line_ = false;
    line_ = Line::blank;
    n_span_ = run_ = 0;
}

bool RegionState::is_code() const {
    const bool is_run = run_ > 0 && run_char_ == '`';
    return fence_ != 0 || (n_span_ == 0 ? is_run : !is_run || run_ != n_span_);
}

pyfly_region RegionState::region(const std::string & text) const {
    if (tool_ != 0) {
        return PYFLY_REGION_STRUCTURED;
    }
    if (think_ != 0) {
        return PYFLY_REGION_THINK;
    }
    if (is_code()) {
        return PYFLY_REGION_CODE;
    }
    bool is_behind = is_behind_number_;
    for (const char c : text) {
        if (is_digit(c) || (is_behind && is_one_of(c, operators))) {
            return PYFLY_REGION_NUMBERS;
        }
        is_behind = is_behind_number(is_behind, c);
    }
    return PYFLY_REGION_PROSE;
}

RegionTracker::RegionTracker(const Vocabulary & vocabulary, const std::vector<int32_t> & history, bool is_structured)
    : vocabulary_(&vocabulary), begin_(history.size()), is_structured_(is_structured), states_(1) {
    for (const int32_t token : history) {
        states_[0].read(vocabulary.piece(token));
    }
}

pyfly_region RegionTracker::at(const std::vector<int32_t> & history, int32_t drafted, int32_t choice) {
    while (begin_ + states_.size() <= history.size()) {
        RegionState state = states_.back();
        state.read(vocabulary_->piece(history[begin_ + states_.size() - 1]));
        states_.push_back(state);
    }
    if (is_structured_) {
        return PYFLY_REGION_STRUCTURED;
    }
    const pyfly_region region = states_.back().region(vocabulary_->piece(drafted).text);
    return drafted == choice || region != PYFLY_REGION_PROSE ? region
                                                             : states_.back().region(vocabulary_->piece(choice).text);
}

void RegionTracker::truncate(int64_t position) {
    const size_t n = static_cast<size_t>(position) - begin_ + 1;
    if (states_.size() > n) {
        states_.resize(n);
    }
}

} // namespace pyfly
