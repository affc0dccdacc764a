// UTF-8, byte by byte.
#pragma once

#include <cstddef>
#include <string>

namespace pyfly {

enum class Utf8 { whole, part, wrong };

// Whether bytes are one character, the beginning of one, or neither. Requires bytes not to be empty.
Utf8 utf8_of(const std::string & bytes);

// Appends bytes to valid text: whole characters at once, what begins one waits in `tail` (at most 3 bytes) for the
// rest, and what cannot be UTF-8 becomes U+FFFD.
void append_utf8(std::string & text, std::string & tail, const std::string & bytes);

// Puts U+FFFD for a character that will never be whole.
void end_utf8(std::string & text, std::string & tail);

// Whether a character begins at this byte.
inline bool begins_utf8(char byte) {
    return (static_cast<unsigned char>(byte) & 0xC0) != 0x80;
}

} // namespace pyfly
