#include "model_file.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "error.h"
#include "release.h"
#include "release_llama.h"

namespace pyfly {

namespace {

std::optional<int64_t> integer_at(const gguf_context * gguf, int64_t key) {
    switch (gguf_get_kv_type(gguf, key)) {
        case GGUF_TYPE_UINT8:
            return gguf_get_val_u8(gguf, key);
        case GGUF_TYPE_INT8:
            return gguf_get_val_i8(gguf, key);
        case GGUF_TYPE_UINT16:
            return gguf_get_val_u16(gguf, key);
        case GGUF_TYPE_INT16:
            return gguf_get_val_i16(gguf, key);
        case GGUF_TYPE_UINT32:
            return gguf_get_val_u32(gguf, key);
        case GGUF_TYPE_INT32:
            return gguf_get_val_i32(gguf, key);
        case GGUF_TYPE_UINT64:
            return static_cast<int64_t>(gguf_get_val_u64(gguf, key));
        case GGUF_TYPE_INT64:
            return gguf_get_val_i64(gguf, key);
        default:
            return std::nullopt;
    }
}

bool ends_with(std::string_view text, std::string_view end) {
    return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

std::string block(int64_t i, const char * tensor) {
    return "blk." + std::to_string(i) + "." + tensor;
}

} // namespace

int32_t mtp_draft_max(const std::string & architecture, int32_t n_nextn) {
    if (n_nextn < 1 || !has_nextn || !is_known(with_graph, architecture)) {
        return 0;
    }
    if (n_nextn == 1) {
        return INT32_MAX;
    }
    return contains(with_chain, architecture) ? n_nextn : 0;
}

int32_t ModelFile::mtp_draft_max() const {
    return missing_mtp_tensor().empty() && !has_flat_mtp() ? pyfly::mtp_draft_max(architecture_, n_nextn()) : 0;
}

bool ModelFile::has_flat_mtp() const {
    const std::vector<double> sections = numbers("rope.dimension_sections");
    const bool is_in_sections = sections.size() > 1 && sections[0] > 0 && sections[1] > 0; // llama.cpp's own criterion
    return is_in_sections && contains(without_sections, architecture_);
}

ModelFile::ModelFile(const std::string & path) : path_(path) {
    ggml_context * tensors = nullptr;
    gguf_.reset(gguf_init_from_file(path.c_str(), {/*no_alloc=*/true, &tensors}));
    tensors_.reset(tensors);
    if (!gguf_) {
        throw Error(
            PYFLY_STATUS_INVALID,
            "'" + path +
                "' is not a complete GGUF file: its header is truncated or damaged{log}; download or convert it again");
    }
    architecture_ = text("general.architecture");
    tokens_ = gguf_find_key(gguf_.get(), "tokenizer.ggml.tokens");
    if (tokens_ >= 0 && (gguf_get_kv_type(gguf_.get(), tokens_) != GGUF_TYPE_ARRAY ||
                         gguf_get_arr_type(gguf_.get(), tokens_) != GGUF_TYPE_STRING)) {
        tokens_ = -1;
    }
}

std::optional<int64_t> ModelFile::integer(const char * name) const {
    const int64_t key = gguf_find_key(gguf_.get(), (architecture_ + "." + name).c_str());
    return key < 0 ? std::nullopt : integer_at(gguf_.get(), key);
}

// A number or an array of numbers, of the types that llama.cpp takes; empty if there are none.
std::vector<double> ModelFile::numbers(const char * name) const {
    const int64_t key = gguf_find_key(gguf_.get(), (architecture_ + "." + name).c_str());
    if (key < 0) {
        return {};
    }
    const bool is_array = gguf_get_kv_type(gguf_.get(), key) == GGUF_TYPE_ARRAY;
    const gguf_type type = is_array ? gguf_get_arr_type(gguf_.get(), key) : gguf_get_kv_type(gguf_.get(), key);
    if (type != GGUF_TYPE_UINT32 && type != GGUF_TYPE_INT32 && type != GGUF_TYPE_FLOAT32) {
        return {};
    }
    const void * data = is_array ? gguf_get_arr_data(gguf_.get(), key) : gguf_get_val_data(gguf_.get(), key);
    std::vector<double> out(is_array ? gguf_get_arr_n(gguf_.get(), key) : 1);
    for (size_t i = 0; i < out.size(); i++) {
        out[i] = type == GGUF_TYPE_UINT32  ? static_cast<const uint32_t *>(data)[i]
                 : type == GGUF_TYPE_INT32 ? static_cast<const int32_t *>(data)[i]
                                           : static_cast<double>(static_cast<const float *>(data)[i]);
    }
    return out;
}

std::optional<bool> ModelFile::boolean(const char * name) const {
    const int64_t key = gguf_find_key(gguf_.get(), (architecture_ + "." + name).c_str());
    if (key < 0) {
        return std::nullopt;
    }
    return gguf_get_kv_type(gguf_.get(), key) == GGUF_TYPE_BOOL && gguf_get_val_bool(gguf_.get(), key);
}

std::optional<int64_t> ModelFile::mask_token() const {
    const int64_t key = gguf_find_key(gguf_.get(), "tokenizer.ggml.mask_token_id");
    return key < 0 ? std::nullopt : integer_at(gguf_.get(), key);
}

std::string ModelFile::text(const char * key) const {
    const int64_t i = gguf_find_key(gguf_.get(), key);
    return i >= 0 && gguf_get_kv_type(gguf_.get(), i) == GGUF_TYPE_STRING ? gguf_get_val_str(gguf_.get(), i) : "";
}

size_t ModelFile::n_tokens() const {
    return tokens_ < 0 ? 0 : gguf_get_arr_n(gguf_.get(), tokens_);
}

std::string_view ModelFile::token(size_t i) const {
    return gguf_get_arr_str(gguf_.get(), tokens_, i);
}

int64_t ModelFile::tensor_size(const std::string & name, int32_t dimension) const {
    const ggml_tensor * tensor = ggml_get_tensor(tensors_.get(), name.c_str());
    return tensor == nullptr ? 0 : tensor->ne[dimension];
}

std::optional<std::vector<int64_t>> ModelFile::read_integers(const std::string & name) const {
    const int64_t tensor = gguf_find_tensor(gguf_.get(), name.c_str());
    if (tensor < 0 || gguf_get_tensor_type(gguf_.get(), tensor) != GGML_TYPE_I64) {
        return std::nullopt;
    }
    const std::filesystem::path path = std::filesystem::u8path(path_);
    const size_t n_bytes = gguf_get_tensor_size(gguf_.get(), tensor);
    const uint64_t begin = gguf_get_data_offset(gguf_.get()) + gguf_get_tensor_offset(gguf_.get(), tensor);
    const uint64_t n_file = std::filesystem::file_size(path);
    if (begin > n_file || n_bytes > n_file - begin) {
        return std::nullopt;
    }
    std::vector<int64_t> values(n_bytes / sizeof(int64_t));
    std::ifstream file(path, std::ios::binary);
    file.seekg(static_cast<std::streamoff>(begin));
    file.read(reinterpret_cast<char *>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(int64_t)));
    return file ? std::optional(std::move(values)) : std::nullopt;
}

int64_t ModelFile::n_ctx_short() const {
    const int64_t n_ctx_train = integer("context_length").value_or(0);
    return has_tensor("rope_factors_long.weight")
               ? integer("rope.scaling.original_context_length").value_or(n_ctx_train)
               : 0;
}

bool ModelFile::is_split() const {
    const int64_t key = gguf_find_key(gguf_.get(), "split.count");
    return key >= 0 && integer_at(gguf_.get(), key).value_or(0) > 1;
}

std::vector<const ggml_tensor *> ModelFile::query_matrices() const {
    std::vector<const ggml_tensor *> out;
    ggml_tensor * tensor = ggml_get_first_tensor(tensors_.get());
    for (; tensor != nullptr; tensor = ggml_get_next_tensor(tensors_.get(), tensor)) {
        for (const char * end : {".attn_q.weight", ".attn_q_b.weight", ".attn_qkv.weight"}) {
            if (ends_with(tensor->name, end)) {
                out.push_back(tensor);
            }
        }
    }
    return out;
}

// llama.cpp's own criterion: it then takes every other tensor for optional.
bool ModelFile::is_head_only() const {
    return n_nextn() > 0 && !is_split() && !has_tensor("blk.0.attn_norm.weight");
}

// What a fuzzer of headers found llama.cpp to compute with unseen: it divides by zero, aborts where no guard catches
// it, or does not end. To follow the file's name in a sentence; empty if there is nothing.
std::string ModelFile::header_problem() const {
    const auto first = [&](const char * name, int64_t otherwise) { return integer(name).value_or(otherwise); };
    const auto is = [](const std::string & key, int64_t value) { return "has " + key + " = " + std::to_string(value); };
    if (const int64_t n = first("block_count", 0); n > most_layers) {
        return is("block_count", n) + ", which must be at most " + std::to_string(most_layers);
    }
    if (first("full_attention_interval", 1) == 0) {
        return is("full_attention_interval", 0) + ", which must be at least 1";
    }
    if (contains(with_experts, architecture_) && first("expert_used_count", 0) < 1) {
        return "uses none of its experts";
    }
    for (const std::string key : {"attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"}) {
        for (const double value : numbers(key.c_str())) {
            if (!(value >= 0.0)) { // NaN, too
                return "has " + key + " = " + std::to_string(value) + ", which must be at least 0";
            }
        }
    }
    // Heads read as many floats of a hidden state as the file says; the graphs give one of embedding_length.
    const int64_t n_embd = first("embedding_length", 0), n_out = first("embedding_length_out", n_embd);
    const bool is_head = n_nextn() > 0 || architecture_ == "eagle3" || architecture_ == "dflash";
    if (n_out != n_embd && is_head && architecture_ != "deepseek4") {
        return is("embedding_length_out", n_out) + " beside embedding_length = " + std::to_string(n_embd);
    }
    const std::vector<double> n_heads = numbers("attention.head_count");
    const int64_t n_head = n_heads.empty() ? 0 : static_cast<int64_t>(n_heads.front());
    const int64_t n_key = n_head < 1 ? 0 : first("attention.key_length", n_embd / n_head);
    for (const char * key : {"rope.dimension_count", "rope.dimension_count_swa"}) {
        const int64_t most = ends_with(key, "swa") ? first("attention.key_length_swa", n_key) : n_key;
        const std::optional<int64_t> n = integer(key);
        if (n && n_head > 0 && architecture_ != without_rope && (*n < 2 || *n % 2 != 0 || *n > most)) {
            return is(key, *n) + ", which must be even and from 2 to the " + std::to_string(most) + " of a head";
        }
    }
    std::vector<double> sections = numbers("rope.dimension_sections");
    if (!sections.empty()) {
        sections.resize(4, sections.size() == 1 ? sections.front() : 0.0);
        const double n_rotated = sections[0] + sections[1] + sections[2], n = n_rotated + sections[3];
        if (n_head > 0 && (n > static_cast<double>(n_key) || *std::min_element(sections.begin(), sections.end()) < 0 ||
                           (n_rotated < 1 && (n > 0 || contains(with_sections, architecture_))))) {
            return is("the sum of rope.dimension_sections", static_cast<int64_t>(n)) + ", for heads of " +
                   std::to_string(n_key);
        }
    }
    for (int64_t i = 0; i < gguf_get_n_tensors(gguf_.get()); i++) {
        const std::string_view name = gguf_get_tensor_name(gguf_.get(), i);
        const bool is_ids = ends_with(name, "d2t") || name.find("tid2eid") != name.npos;
        const bool is_vector = !ends_with(name, ".weight") || name.find("norm") != name.npos;
        const ggml_type type = gguf_get_tensor_type(gguf_.get(), i);
        const bool is_weight = type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 ||
                               (ggml_is_quantized(type) && type != GGML_TYPE_Q8_1 && type != GGML_TYPE_Q8_K);
        if (!is_ids && (is_vector ? type != GGML_TYPE_F32 : !is_weight)) {
            return "has the tensor " + std::string(name) + " of type " + ggml_type_name(type) +
                   ", which cannot be computed with";
        }
    }
    return {};
}

void ModelFile::require_loadable() const {
    const auto refuse = [&](const std::string & why) {
        throw Error(PYFLY_STATUS_INVALID, "'" + path_ + "' " + why + "; convert or download the model again");
    };
    const std::string why = header_problem();
    if (!why.empty()) {
        refuse(why);
    }
    const int64_t n_block = integer("block_count").value_or(0);
    for (const WrongRows & wrong : with_wrong_rows) {
        if (architecture_ == wrong.architecture) {
            throw Error(PYFLY_STATUS_INVALID, "'" + path_ + "' is of architecture " + architecture_ +
                                                  ", whose graph in llama.cpp " + wrong.why + "; " + wrong.remedy);
        }
    }
    if (n_nextn() > n_block) {
        refuse("claims " + std::to_string(n_nextn()) + " NextN layers of " + std::to_string(n_block) + " blocks");
    }
    const bool is_qwen35 = architecture_ == "qwen35" || architecture_ == "qwen35moe";
    if (is_qwen35 && !is_split()) {
        // The loader takes these for optional and the graph does not.
        for (int64_t i = 0; i < n_block; i++) {
            for (const char * tensor : {"attn_qkv.weight", "attn_gate.weight"}) {
                if (has_tensor(block(i, "ssm_conv1d.weight")) && !has_tensor(block(i, tensor))) {
                    refuse("lacks the tensor " + block(i, tensor));
                }
            }
        }
    }
}

void ModelFile::require_model() const {
    require_loadable();
    if (is_head_only()) {
        throw Error(PYFLY_STATUS_INVALID, "'" + path_ +
                                              "' holds an MTP head without its model; load the model and give it this "
                                              "file {head}");
    }
    if (architecture_ == "eagle3" || architecture_ == "dflash") {
        throw Error(PYFLY_STATUS_INVALID, "'" + path_ + "' is a head of architecture " + architecture_ +
                                              ", not a model; load its target and give it the head as a drafter");
    }
}

void ModelFile::require_mtp() const {
    require_loadable();
    if (n_nextn() < 1) {
        throw Error(PYFLY_STATUS_INCOMPATIBLE, "'" + path_ +
                                                   "' has no MTP head (no NextN layers); give a companion file "
                                                   "{head} or choose another drafter");
    }
    const std::string missing = missing_mtp_tensor();
    if (!missing.empty()) {
        throw Error(PYFLY_STATUS_INVALID, "the MTP head in '" + path_ + "' lacks the tensor " + missing +
                                              "; convert or download the model again, or give the file that has it "
                                              "{head}");
    }
    if (has_flat_mtp()) {
        throw Error(PYFLY_STATUS_INCOMPATIBLE, "llama.cpp cannot run the NextN layer of '" + path_ +
                                                   "': the model rotates in sections (rope.dimension_sections), and "
                                                   "its MTP graph of architecture " +
                                                   architecture_ + " does not; choose another drafter");
    }
    if (mtp_draft_max() < 1) {
        throw Error(PYFLY_STATUS_INCOMPATIBLE, "llama.cpp cannot run the " + std::to_string(n_nextn()) +
                                                   " NextN layer(s) of '" + path_ + "', of architecture " +
                                                   architecture_ + "; choose another drafter");
    }
}

// The first tensor that an announced MTP head lacks, empty if there is none.
std::string ModelFile::missing_mtp_tensor() const {
    const int64_t n_block = integer("block_count").value_or(0);
    std::vector<const char *> needed = {"nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight"};
    if (architecture_ == "mimo2") { // the loader takes these for optional and the graph does not
        needed.insert(needed.end(), {"attn_qkv.weight", "ffn_gate.weight", "ffn_down.weight", "ffn_up.weight"});
    }
    for (int64_t i = n_block - n_nextn(); i < n_block && !is_split(); i++) {
        for (const char * tensor : needed) {
            if (!has_tensor(block(i, tensor))) {
                return block(i, tensor);
            }
        }
    }
    return {};
}

} // namespace pyfly
