// Stands in for the header of the same name in llama.cpp's common/, which llama-cpp-python does not install. The
// functions that call these compile with them; those that we call do not reach them.
#pragma once

#include <ggml.h>
#include <llama.h>

#include <algorithm>

struct common_batch {
    explicit common_batch(llama_context *) {}
    void add(llama_token, llama_pos, llama_seq_id, bool) {}
    void clear() {}
    llama_batch_ext * get() { return nullptr; }
};

inline void common_init() {}
inline void common_log_set_verbosity_thold(int) {}
inline int common_log_get_verbosity(ggml_log_level) {
    return 0;
}
inline void * common_log_main() {
    return nullptr;
}
inline void common_log_flush(void *) {}
