#include "companion.h"

#include <algorithm>
#include <cstdlib>

#include "draft_context.h"
#include "error.h"

namespace pyfly {

namespace {

// What of the vocabularies differs so that one cannot draft for the other; as vocabulary_difference(), which has the
// last word when the models are loaded.
std::string header_vocabulary_difference(const ModelFile & target, const ModelFile & draft) {
    if (target.text("tokenizer.ggml.model") != draft.text("tokenizer.ggml.model")) {
        return "tokenizer types";
    }
    const size_t n_target = target.n_tokens(), n_draft = draft.n_tokens();
    const size_t n_shared = std::min(n_target, n_draft);
    for (size_t i = 0; i < n_shared; i++) {
        if (target.token(i) != draft.token(i)) {
            return "tokens " + std::to_string(i);
        }
    }
    return n_shared == 0 || std::max(n_target, n_draft) - n_shared > most_padding ? "vocabulary sizes" : "";
}

} // namespace

std::string companion_word(const ModelFile & target, const ModelFile & file) {
    const auto refuse = [&](const std::string & why) {
        throw Error(PYFLY_STATUS_INCOMPATIBLE,
                    "'" + file.path() + "' cannot draft for '" + target.path() + "': " + why + "; use another file");
    };
    const auto require_vocabulary = [&] {
        const std::string differing = header_vocabulary_difference(target, file);
        if (!differing.empty()) {
            refuse("their " + differing + " differ");
        }
    };
    file.require_loadable();
    const std::optional<int64_t> width = target.integer("embedding_length");
    if (file.architecture() == "eagle3") {
        if (file.integer("target_hidden_size") != width) {
            refuse("the EAGLE-3 head reads hidden states of another width");
        }
        require_vocabulary();
        return "eagle3";
    }
    if (file.architecture() == "dflash") {
        const bool is_dspark = file.has_tensor("markov_w1.weight");
        if (file.integer("embedding_length") != width) {
            refuse(std::string("the ") + (is_dspark ? "DSpark" : "DFlash") +
                   " head reads hidden states of another width");
        }
        require_vocabulary();
        return is_dspark ? "dspark" : "dflash";
    }
    if (file.is_head_only()) {
        if (file.architecture() != target.architecture() || file.integer("embedding_length") != width) {
            refuse("the MTP head is of another model");
        }
        file.require_mtp();
        return "mtp";
    }
    file.require_model();
    if (file.integer("pooling_type").value_or(0) > 0) {
        refuse("it makes embeddings, not text");
    }
    require_vocabulary();
    return "draft";
}

} // namespace pyfly
