// ggml's aborts as errors, while llama.cpp loads a file.
#pragma once

namespace pyfly {

// While one lives, an assertion of ggml or llama.cpp that fails on its thread throws std::runtime_error with the
// assertion's text instead of ending the process. For the calls that load a model or make a context, alone: llama.cpp
// catches what is thrown in them, logs it and returns null. Elsewhere nothing catches it, and the process ends as it
// would have. It is the net below ModelFile, which says what is wrong with the file; this cannot. Threads of a
// backend are not covered, and a compiler that leaves no unwind tables in C code gets no net. Guards may be nested, and
// several threads may have one at once: ggml's callback is the process's, and is put back after the last.
class AbortGuard {
  public:
    AbortGuard();
    ~AbortGuard(); // on the same thread
    AbortGuard(const AbortGuard &) = delete;
    AbortGuard & operator=(const AbortGuard &) = delete;
};

} // namespace pyfly
