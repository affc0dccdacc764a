#include "utf8.h"

namespace pyfly {

namespace {

constexpr const char * replacement = "\xEF\xBF\xBD";

unsigned at(const std::string & bytes, size_t i) {
    return static_cast<unsigned char>(bytes[i]);
}

} // namespace

Utf8 utf8_of(const std::string & bytes) {
    const unsigned first = at(bytes, 0);
    const size_t n = first < 0x80 ? 1 : first < 0xC2 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : first < 0xF5 ? 4 : 0;
    if (n == 0 || bytes.size() > n) {
        return Utf8::wrong;
    }
    for (size_t i = 1; i < bytes.size(); i++) {
        // No overlong forms, no surrogates, nothing over U+10FFFF.
        const unsigned low = i > 1 ? 0x80 : first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
        const unsigned high = i > 1 ? 0xBF : first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
        if (at(bytes, i) < low || at(bytes, i) > high) {
            return Utf8::wrong;
        }
    }
    return bytes.size() == n ? Utf8::whole : Utf8::part;
}

void end_utf8(std::string & text, std::string & tail) {
    if (!tail.empty()) {
        text += replacement;
        tail.clear();
    }
}

void append_utf8(std::string & text, std::string & tail, const std::string & bytes) {
    for (const char byte : bytes) {
        tail.push_back(byte);
        Utf8 what = utf8_of(tail);
        if (what == Utf8::wrong && tail.size() > 1) { // the byte may begin another character
            end_utf8(text, tail);
            tail.push_back(byte);
            what = utf8_of(tail);
        }
        if (what == Utf8::whole) {
            text += tail;
            tail.clear();
        } else if (what == Utf8::wrong) {
            end_utf8(text, tail);
        }
    }
}

} // namespace pyfly
