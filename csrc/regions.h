// What is being written at a place of a text: code, numbers, thoughts, a tool call, or prose. No llama.h.
//
// A text is read byte by byte, so it does not matter how it is cut into tokens; what is known behind a byte depends on
// the bytes up to it alone. Of what applies the first counts:
//
//   structured  A grammar says what may come, or a tool call is open: behind <tool_call>, <function_call>, <function=,
//               [TOOL_CALLS], <|python_tag|> or <|tool_call_start|>, up to the marker that closes it, or the end of the
//               message where there is none. What is in there is not looked at.
//   think       Behind <think>, <thinking>, <reasoning> or [THINK], up to its closing marker; code in there, too.
//   code        A fenced block, from the third character of its fence on: a line that begins (behind blanks) with three
//               or more ` or ~, up to the end of a line with nothing but as many of them or more. A line with a `
//               behind its ``` is no fence. Or a code span, from its run of ` on to the next run that is as long, or to
//               the end of the line. What opens a tool call or a thought counts in there only as a control token.
//   numbers     Of a token: it has an ASCII digit; or one of = + - * / % < > behind a digit, with nothing between them
//               but blanks and . , $ ( ) [ ] = + - * / % < >.
//   prose       All else.
//
// Every other control token ends what is open: a message ends there. A text goes on in what its prompt left open.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "pyfly.h"
#include "vocabulary.h"

namespace pyfly {

// What is known behind a byte. A copy is a place to go back to.
class RegionState {
  public:
    void read(const Piece & piece);

    // Of a token with this text, if it comes next.
    pyfly_region region(const std::string & text) const;

  private:
    // How far a line has come: blanks; a run of ` or ~ behind them; blanks behind that; more.
    enum class Line : uint8_t { blank, run, behind_run, more };

    void read(char c);
    void read_fence_line(char c);
    void read_block(char c);
    void read_text(char c);
    void read_marker(char c);
    void take_marker(size_t marker, bool is_control);
    bool is_code() const;
    void end_blocks();

    uint32_t markers_ = 0;          // that may be coming, a bit each
    uint8_t n_marker_ = 0;          // their bytes so far
    uint8_t think_ = 0, tool_ = 0;  // what opened it, from 1 on; 0: nothing
    char fence_ = 0;                // ` or ~; 0: none
    char run_char_ = 0;             // of run_
    bool is_fence_line_ = false;    // on the line that opens the fence
    bool is_behind_number_ = false; // an operator is numbers
    Line line_ = Line::blank;
    uint16_t n_fence_ = 0, n_span_ = 0; // characters that opened the fence, the code span; 0: none
    uint16_t run_ = 0;                  // ` or ~ that end here
};

// The regions of one text, whose end may be taken back.
class RegionTracker {
  public:
    // The text begins with these tokens, which stay. The vocabulary is borrowed; is_structured: under a grammar.
    RegionTracker(const Vocabulary & vocabulary, const std::vector<int32_t> & history, bool is_structured);

    // Of the token that follows `history`, which goes on where it was; `drafted` and `choice` may be it, and what
    // either would be counts.
    pyfly_region at(const std::vector<int32_t> & history, int32_t drafted, int32_t choice);

    // The tokens from `position` on go.
    void truncate(int64_t position);

  private:
    const Vocabulary * vocabulary_;
    size_t begin_; // length of what stays
    bool is_structured_;
    std::vector<RegionState> states_; // [i]: behind the first begin_ + i tokens
};

} // namespace pyfly
