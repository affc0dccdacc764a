#include "translation.h"

#include <algorithm>
#include <unordered_map>

#include "stretch.h"
#include "utf8.h"

namespace pyfly {

namespace {

constexpr size_t unknown = SIZE_MAX;
constexpr size_t n_again = 24;     // tokens at the end that are tokenised again where no word begins
constexpr size_t n_chunk = 2048;   // bytes that are tokenised in one go
constexpr double ratio_most = 4.0; // of a text that is in tokens of single bytes, say

bool is_space(char byte) {
    return byte == ' ' || byte == '\n' || byte == '\t' || byte == '\r';
}

// Whether a word and the space before it begin at this byte: no tokenizer joins what is before it and behind it.
bool is_seam(const std::string & text, size_t at) {
    return at > 0 && at + 1 < text.size() && text[at] == ' ' && !is_space(text[at - 1]) && !is_space(text[at + 1]);
}

} // namespace

ControlTokens::ControlTokens(const Tokenizer & from, const Tokenizer & to) : to_(static_cast<size_t>(from.n()), -1) {
    std::unordered_map<std::string, int32_t> by_name;
    for (int32_t token = 0; token < to.n(); token++) {
        if (!to.control(token).empty()) {
            by_name.emplace(to.control(token), token);
        }
    }
    for (int32_t token = 0; token < from.n(); token++) {
        const auto found = by_name.find(from.control(token));
        if (from.control(token).empty() || token == from.begin()) {
            continue; // what every text begins with is there anyway
        }
        to_[static_cast<size_t>(token)] = found != by_name.end() ? found->second : from.is_end(token) ? to.end() : -1;
    }
}

double Translation::ratio() const {
    const double n = static_cast<double>(tokens_.size() + 1), n_seen = static_cast<double>(seen_.size() + 1);
    return std::clamp(n / n_seen, 1.0 / ratio_most, ratio_most);
}

// Takes the text back.
void Translation::cut(const Mark & mark) {
    now_ = mark;
    text_.resize(mark.n_bytes);
    text_controls_.resize(mark.n_controls);
}

// Whether the text behind this place can be tokenised without what is before it.
bool Translation::can_begin_at(const End & end) const {
    if (end.n_bytes >= text_.size()) { // or unknown
        return false;
    }
    if (is_seam(text_, end.n_bytes)) {
        return true;
    }
    return end.n_controls > 0 && text_controls_[end.n_controls - 1].at == end.n_bytes;
}

void Translation::sync(const std::vector<int32_t> & history) {
    const size_t n_stays = n_staying(0, seen_.data(), seen_.size(), history.data(), history.size());
    if (n_stays == seen_.size() && n_stays == history.size()) {
        return;
    }
    seen_.resize(n_stays);
    marks_.resize(n_stays);
    cut(n_stays > 0 ? marks_.back() : Mark{});
    const size_t n_bytes = text_.size(), n_controls = text_controls_.size();
    for (size_t i = n_stays; i < history.size(); i++) {
        const int32_t token = history[i];
        const std::string & piece = from_->piece(token);
        append_utf8(text_, now_.tail, piece);
        if (piece.empty() && !from_->control(token).empty()) {
            end_utf8(text_, now_.tail);
            if ((*controls_)[token] >= 0) {
                text_controls_.push_back({text_.size(), (*controls_)[token]});
            }
        }
        now_.n_bytes = text_.size();
        now_.n_controls = text_controls_.size();
        seen_.push_back(token);
        marks_.push_back(now_);
    }
    // What is still right of the draft's tokens, without the last ones, which might be others before what follows.
    size_t n_kept = tokens_.size();
    while (n_kept > 0 && (ends_[n_kept - 1].n_bytes > n_bytes || ends_[n_kept - 1].n_controls > n_controls)) {
        n_kept--;
    }
    const size_t n_right = n_kept;
    while (n_kept > 0 && !can_begin_at(ends_[n_kept - 1]) &&
           (n_right - n_kept < n_again || ends_[n_kept - 1].n_bytes >= text_.size() ||
            !begins_utf8(text_[ends_[n_kept - 1].n_bytes]))) {
        n_kept--;
    }
    tokens_.resize(n_kept);
    ends_.resize(n_kept);
    if (tokens_.empty() && to_->begin() >= 0) {
        tokens_.push_back(to_->begin());
        ends_.push_back({0, 0});
    }
    const size_t first = ends_.empty() ? 0 : ends_.back().n_controls;
    for (size_t i = first; i < text_controls_.size(); i++) {
        tokenize(text_controls_[i].at);
        tokens_.push_back(text_controls_[i].token);
        ends_.push_back({text_controls_[i].at, i + 1});
    }
    tokenize(text_.size());
}

// Tokenises up to the n_bytes-th byte of the text.
void Translation::tokenize(size_t n_bytes) {
    const End last = ends_.empty() ? End{0, 0} : ends_.back();
    for (size_t begin = last.n_bytes, end = 0; begin < n_bytes; begin = end) {
        end = std::min(begin + n_chunk, n_bytes);
        size_t seam = end;
        while (end < n_bytes && seam > begin && !is_seam(text_, seam)) {
            seam--;
        }
        end = seam > begin ? seam : end;
        while (end < n_bytes && !begins_utf8(text_[end])) {
            end--;
        }
        const std::vector<int32_t> made = to_->tokenize(text_.substr(begin, end - begin));
        size_t at = begin;
        for (const int32_t token : made) {
            const std::string & piece = to_->piece(token);
            const bool is_same = at != unknown && text_.compare(at, piece.size(), piece) == 0;
            at = is_same ? at + piece.size() : unknown;
            tokens_.push_back(token);
            ends_.push_back({at, last.n_controls});
        }
        if (!made.empty()) {
            ends_.back().n_bytes = end;
        }
    }
}

} // namespace pyfly
