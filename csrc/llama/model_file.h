// The header of a GGUF file, read before the file is loaded: llama.cpp aborts the process, or crashes later, over some
// of what a file can contain, and these checks turn that into an error.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ggml.h"
#include "gguf.h"

namespace pyfly {

// Most tokens that n_nextn NextN blocks draft in a row: any number (INT32_MAX) if one block feeds itself, one for each
// if they are chained, 0 if llama.cpp cannot run them.
int32_t mtp_draft_max(const std::string & architecture, int32_t n_nextn);

class ModelFile {
  public:
    // Throws Error(PYFLY_STATUS_INVALID) for a file that is not a readable GGUF file.
    explicit ModelFile(const std::string & path);

    const std::string & path() const { return path_; }
    const std::string & architecture() const { return architecture_; }

    // Value of the key "<architecture>.<name>"; nothing if it is missing or no integer.
    std::optional<int64_t> integer(const char * name) const;

    // The same for a key that is true or false; false for one of another type, as llama.cpp reads it.
    std::optional<bool> boolean(const char * name) const;

    // The token that stands for one yet to be found; nothing if the file names none.
    std::optional<int64_t> mask_token() const;

    // Value of a key; empty if it is missing or no text.
    std::string text(const char * key) const;

    // The vocabulary as the header spells it; no tokens if it has none. token(i) is borrowed.
    size_t n_tokens() const;
    std::string_view token(size_t i) const;

    bool has_tensor(const std::string & name) const { return gguf_find_tensor(gguf_.get(), name.c_str()) >= 0; }

    // Size of a tensor's dimension (0: the fastest), 0 if there is no such tensor.
    int64_t tensor_size(const std::string & name, int32_t dimension) const;

    // The values of an I64 tensor; nothing if it is of another type or cut off.
    std::optional<std::vector<int64_t>> read_integers(const std::string & name) const;

    // Of two RoPE scalings (LongRoPE), contexts of more positions get the long one; 0: there is one scaling.
    int64_t n_ctx_short() const;

    // Whether other files hold the rest of the tensors.
    bool is_split() const;

    // Appended NextN (MTP) blocks that the file announces (some keep them in another file), whether it holds nothing
    // else, and how many tokens those that it has can draft in a row.
    int32_t n_nextn() const { return static_cast<int32_t>(integer("nextn_predict_layers").value_or(0)); }
    bool is_head_only() const;
    int32_t mtp_draft_max() const;

    // Positions that have a learned embedding, and so the most that a text may have; 0: there are no such embeddings.
    int64_t n_learned_positions() const { return tensor_size("position_embd.weight", 1); }

    // Matrices whose products are the queries of attention. Borrowed.
    std::vector<const ggml_tensor *> query_matrices() const;

    // Throws Error(PYFLY_STATUS_INVALID) where loading the file, or decoding with it, would end the process.
    void require_loadable() const;

    // Throws Error(PYFLY_STATUS_INVALID) for what is not a whole model.
    void require_model() const;

    // Throws Error unless the file has an MTP head: INCOMPATIBLE if it has none that llama.cpp can run, INVALID if the
    // head's tensors are incomplete.
    void require_mtp() const;

  private:
    std::vector<double> numbers(const char * name) const;
    std::string header_problem() const;
    std::string missing_mtp_tensor() const;
    bool has_flat_mtp() const;

    struct Deleter {
        void operator()(gguf_context * gguf) const { gguf_free(gguf); }
        void operator()(ggml_context * tensors) const { ggml_free(tensors); }
    };

    std::string path_;
    std::unique_ptr<gguf_context, Deleter> gguf_;
    std::unique_ptr<ggml_context, Deleter> tensors_; // without their data
    std::string architecture_;
    int64_t tokens_ = -1; // key of the vocabulary; -1: none
};

} // namespace pyfly
