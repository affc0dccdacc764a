#include "header_limits.h"

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <deque>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "ggml.h"

namespace pyfly {

namespace {

// Values of "<architecture>.<key>", each element of an array. Some files hold every key there is, with 0 for those that
// their architecture does not read.
struct Limit {
    const char * key;
    double low, high;
    const char * readers = nullptr; // the only architectures that read it, null: any may
};
constexpr size_t most_layers = 512;
constexpr double any_size = 1 << 24; // more than a real model has, and small enough to multiply
constexpr Limit limits[] = {
    {"block_count", 1, most_layers},
    {"nextn_predict_layers", 0, most_layers},
    {"embedding_length", 1, any_size},
    {"embedding_length_out", 0, any_size},
    {"feed_forward_length", 0, any_size},
    {"vocab_size", 0, any_size},
    {"full_attention_interval", 1, INT32_MAX, " minimax-01 qwen35 qwen35moe qwen3next qwen4exp "},
    {"token_shift_count", 1, 2, " arwkv7 rwkv6 rwkv6qwen2 rwkv7 "},
    {"shortconv.l_cache", 2, any_size, " lfm2 lfm2moe "},
    {"wkv.head_size", 1, any_size, " arwkv7 rwkv6 rwkv6qwen2 rwkv7 "},
    {"expert_count", 0, 1024},
    {"expert_group_count", 0, 1024},
    {"expert_group_used_count", 0, 1024},
    {"expert_used_count", 0, 1024},
    {"expert_gating_func", 0, 4},
    {"attention.head_count", 0, any_size},
    {"attention.head_count_kv", 0, any_size},
    {"attention.key_length", 0, any_size},
    {"attention.value_length", 0, any_size},
    {"attention.key_length_swa", 0, any_size},
    {"attention.value_length_swa", 0, any_size},
    {"attention.layer_norm_epsilon", 0, FLT_MAX},
    {"attention.layer_norm_rms_epsilon", 0, FLT_MAX},
    {"attention.group_norm_epsilon", 0, FLT_MAX},
    {"hyper_connection.epsilon", 0, FLT_MAX},
    {"rope.dimension_count", 0, any_size},
    {"rope.dimension_count_swa", 0, any_size},
    {"rope.dimension_sections", 0, any_size},
    {"ssm.conv_kernel", 0, any_size},
    {"ssm.inner_size", 0, any_size},
    {"ssm.state_size", 0, any_size},
    {"ssm.time_step_rank", 0, any_size},
    {"ssm.group_count", 0, any_size},
};

// Architectures whose graph never rotates, or not always: what they say about it does not matter.
constexpr std::array without_rope = {
    "arwkv7",         "bloom",           "clip",        "glm5-next",  "gpt2",   "granitehybrid", "jais",
    "jamba",          "kimi-k3",         "kimi-linear", "mamba",      "mamba2", "mpt",           "nemotron_h",
    "nemotron_h_moe", "refact",          "rwkv6",       "rwkv6qwen2", "rwkv7",  "starcoder",     "t5",
    "t5encoder",      "wavtokenizer-dec"};
// Those that rotate in sections; others do so only if the file says which.
constexpr std::array with_sections = {"paddleocr", "qwen2vl", "qwen35",     "qwen35moe",
                                      "qwen3tts",  "qwen3vl", "qwen3vlmoe", "qwen4exp"};
// Recurrent layers, by kind.
constexpr std::array with_mamba2 = {"falcon-h1", "granitehybrid", "mamba2", "nemotron_h", "nemotron_h_moe"};
constexpr std::array with_double_width = {"granitehybrid", "jamba"};
constexpr std::array with_delta_net = {"qwen35", "qwen35moe", "qwen3next", "qwen4exp"};
// Those that divide by the number of experts that are used.
constexpr std::array with_experts = {"qwen35moe", "qwen3next", "qwen4exp"};
// Graphs that take it for granted that keys and values of a head are equally long, besides the next ones.
constexpr std::array with_equal_heads = {"dflash", "eagle3", "falcon", "gemma2", "gemma3",   "grok",
                                         "llama",  "phi2",   "phi3",   "qwen35", "qwen35moe"};
// Those with plain attention that assert that the whole head is rotated. (The loader checks llama, falcon, deci and
// llama-embed.)
constexpr std::array with_whole_rope = {
    "exaone",   "exaone4", "ernie4_5", "granite",  "internlm2", "llama4",   "mistral3", "olmo2",      "olmoe", "qwen2",
    "qwen2moe", "qwen2vl", "qwen3",    "qwen3moe", "qwen3vl",   "seed_oss", "smollm3",  "starcoder2", "xverse"};

template <size_t n> bool contains(const std::array<const char *, n> & names, const std::string & name) {
    return std::find(names.begin(), names.end(), name) != names.end();
}

bool ends_with(std::string_view text, std::string_view end) {
    return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

std::string written(double value) {
    return value == std::floor(value) && std::abs(value) < 1e15 ? std::to_string(static_cast<int64_t>(value))
                                                                : std::to_string(value);
}

template <typename T> void append(std::vector<double> & out, const void * data, size_t n) {
    const T * values = static_cast<const T *>(data);
    for (size_t i = 0; i < n; i++) {
        out.push_back(static_cast<double>(values[i]));
    }
}

class Header {
  public:
    Header(const gguf_context * gguf, const std::string & architecture) : gguf_(gguf), architecture_(architecture) {}

    // The numbers of a field, one or the elements of an array; none if it is missing or of another type.
    std::vector<double> numbers(const char * name) const {
        std::vector<double> out;
        const int64_t key = gguf_find_key(gguf_, (architecture_ + "." + name).c_str());
        if (key < 0) {
            return out;
        }
        const bool is_array = gguf_get_kv_type(gguf_, key) == GGUF_TYPE_ARRAY;
        const gguf_type type = is_array ? gguf_get_arr_type(gguf_, key) : gguf_get_kv_type(gguf_, key);
        if (type == GGUF_TYPE_STRING || type == GGUF_TYPE_ARRAY) {
            return out;
        }
        const size_t n = is_array ? std::min(gguf_get_arr_n(gguf_, key), most_layers) : 1; // longer ones are not loaded
        const void * data = is_array ? gguf_get_arr_data(gguf_, key) : gguf_get_val_data(gguf_, key);
        switch (type) {
            case GGUF_TYPE_BOOL:
            case GGUF_TYPE_INT8:
                append<int8_t>(out, data, n);
                break;
            case GGUF_TYPE_UINT8:
                append<uint8_t>(out, data, n);
                break;
            case GGUF_TYPE_INT16:
                append<int16_t>(out, data, n);
                break;
            case GGUF_TYPE_UINT16:
                append<uint16_t>(out, data, n);
                break;
            case GGUF_TYPE_INT32:
                append<int32_t>(out, data, n);
                break;
            case GGUF_TYPE_UINT32:
                append<uint32_t>(out, data, n);
                break;
            case GGUF_TYPE_INT64:
                append<int64_t>(out, data, n);
                break;
            case GGUF_TYPE_UINT64:
                append<uint64_t>(out, data, n);
                break;
            case GGUF_TYPE_FLOAT32:
                append<float>(out, data, n);
                break;
            case GGUF_TYPE_FLOAT64:
                append<double>(out, data, n);
                break;
            default:
                break;
        }
        return out;
    }

    // The first of them. Within the limits, so that integers are exact.
    int64_t first(const char * name, int64_t otherwise) const {
        const std::vector<double> all = numbers(name);
        return all.empty() ? otherwise : static_cast<int64_t>(all.front());
    }

    int64_t largest(const char * name) const {
        const std::vector<double> all = numbers(name);
        return all.empty() ? 0 : static_cast<int64_t>(*std::max_element(all.begin(), all.end()));
    }

    const std::string & architecture() const { return architecture_; }
    const gguf_context * gguf() const { return gguf_; }

  private:
    const gguf_context * gguf_;
    const std::string & architecture_;
};

std::string outside_limits(const Header & header) {
    for (const Limit & limit : limits) {
        const std::string reader = " " + header.architecture() + " ";
        if (limit.readers && std::string_view(limit.readers).find(reader) == std::string_view::npos) {
            continue;
        }
        for (const double value : header.numbers(limit.key)) {
            if (!(value >= limit.low && value <= limit.high)) { // NaN is outside, too
                return std::string("has ") + limit.key + " = " + written(value) +
                       (value < limit.low      ? ", which must be at least " + written(limit.low)
                        : limit.high < FLT_MAX ? ", which must be at most " + written(limit.high)
                                               : ", which must be finite");
            }
        }
    }
    return {};
}

// Heads read as many floats of a hidden state as the file says; the graphs give one of embedding_length.
std::string wrong_width(const Header & header) {
    const int64_t n = header.first("embedding_length", 0), n_out = header.first("embedding_length_out", n);
    const bool is_head = header.first("nextn_predict_layers", 0) > 0 || header.architecture() == "eagle3" ||
                         header.architecture() == "dflash";
    if (n_out != n && is_head && header.architecture() != "deepseek4") {
        return "has embedding_length_out = " + std::to_string(n_out) +
               " beside embedding_length = " + std::to_string(n);
    }
    return {};
}

std::string wrong_experts(const Header & header) {
    int64_t n = header.first("expert_count", 0), n_used = header.largest("expert_used_count");
    if (n <= 1 && (header.architecture() == "hunyuan-dense" || header.architecture() == "hunyuan_vl")) {
        n = n_used = 0; // as llama.cpp does
    }
    if (n_used > n || (n_used < 1 && (n > 0 || contains(with_experts, header.architecture())))) {
        return "uses " + std::to_string(n_used) + " of " + std::to_string(n) + " experts";
    }
    const int64_t n_groups = header.first("expert_group_count", 0);
    const int64_t n_groups_used = header.first("expert_group_used_count", 0);
    const bool is_grouped = n_groups > 1;
    if (n_groups < 0 || (n_groups > 0 && n_groups >= n) ||
        (is_grouped && (n % n_groups != 0 || n_groups_used < 1 || n_groups_used >= n_groups))) {
        return "uses " + std::to_string(n_groups_used) + " of " + std::to_string(n_groups) + " groups of its " +
               std::to_string(n) + " experts";
    }
    return {};
}

std::string wrong_heads(const Header & header) {
    const std::vector<double> n_heads = header.numbers("attention.head_count");
    const std::vector<double> n_kv_heads = header.numbers("attention.head_count_kv");
    const auto of_layer = [](const std::vector<double> & values, size_t i) {
        return values.empty() ? 0.0 : values[std::min(i, values.size() - 1)];
    };
    for (size_t i = 0; i < std::max(n_heads.size(), n_kv_heads.size()); i++) {
        const double n = of_layer(n_heads, i), n_kv = of_layer(n_kv_heads, i);
        if (n > 0 && n_kv > 0 && std::fmod(n, n_kv) != 0) {
            return "has " + written(n) + " attention heads for " + written(n_kv) + " of keys and values";
        }
    }
    if (n_heads.empty() || n_heads.front() < 1) {
        return {};
    }
    const int64_t by_default = header.first("embedding_length", 0) / static_cast<int64_t>(n_heads.front());
    const int64_t n_key = header.first("attention.key_length", by_default);
    const int64_t n_value = header.first("attention.value_length", by_default);
    const bool is_plain = contains(with_whole_rope, header.architecture());
    if (n_key != n_value && (is_plain || contains(with_equal_heads, header.architecture()))) {
        return "has attention heads with keys of " + std::to_string(n_key) + " and values of " +
               std::to_string(n_value);
    }
    if (contains(without_rope, header.architecture())) {
        return {};
    }
    const auto wrong_rope = [&](const char * key, int64_t n_rope, int64_t n_head) -> std::string {
        if (n_rope < 1 || n_rope % 2 != 0 || n_rope > n_head) {
            return std::string("has ") + key + " = " + std::to_string(n_rope) +
                   ", which must be even and from 2 to the " + std::to_string(n_head) + " of a head";
        }
        return {};
    };
    const int64_t n_rope = header.first("rope.dimension_count", n_key);
    std::string why = wrong_rope("rope.dimension_count", n_rope, n_key);
    if (why.empty() && !header.numbers("rope.dimension_count_swa").empty()) {
        why = wrong_rope("rope.dimension_count_swa", header.first("rope.dimension_count_swa", 0),
                         header.first("attention.key_length_swa", n_key));
    }
    if (!why.empty()) {
        return why;
    }
    if (is_plain) {
        if (n_rope != n_key) {
            return "rotates " + std::to_string(n_rope) + " of the " + std::to_string(n_key) + " dimensions of a head";
        }
        for (int64_t i = 0; i < header.first("block_count", 0); i++) {
            const std::string name = "blk." + std::to_string(i) + ".attn_q.weight";
            const int64_t tensor = gguf_find_tensor(header.gguf(), name.c_str());
            const int64_t n = static_cast<int64_t>(of_layer(n_heads, static_cast<size_t>(i)));
            if (tensor >= 0 && gguf_get_tensor_ne(header.gguf(), tensor)[1] != n * n_key) {
                return "has " + std::to_string(n) + " attention heads of " + std::to_string(n_key) +
                       ", which do not fit the tensor " + name;
            }
        }
    }
    std::vector<double> sections = header.numbers("rope.dimension_sections");
    sections.resize(sections.empty() ? 0 : 4, sections.size() == 1 ? sections.front() : 0.0);
    double n_sections = 0;
    for (const double n : sections) {
        n_sections += n;
    }
    const bool is_needed = contains(with_sections, header.architecture()) ||
                           (header.architecture() == "dflash" && n_sections > 0); // they say how it rotates
    if (n_sections > static_cast<double>(n_key) ||
        (is_needed && !sections.empty() && sections[0] + sections[1] + sections[2] < 1)) {
        return "has " + written(n_sections) + " in rope.dimension_sections, for heads of " + std::to_string(n_key);
    }
    return {};
}

std::string wrong_recurrence(const Header & header) {
    const int64_t n_inner = header.first("ssm.inner_size", 0), n_state = header.first("ssm.state_size", 0);
    const int64_t n_rank = header.first("ssm.time_step_rank", 0), n_groups = header.first("ssm.group_count", 0);
    const auto sizes = [&] {
        return "has recurrent layers of ssm.inner_size " + std::to_string(n_inner) + ", state_size " +
               std::to_string(n_state) + ", time_step_rank " + std::to_string(n_rank) + " and group_count " +
               std::to_string(n_groups) + ", which do not fit together";
    };
    if (header.numbers("ssm.inner_size").empty()) {
        return {}; // the loader asks for what it needs
    }
    if (contains(with_double_width, header.architecture()) && n_inner != 2 * header.first("embedding_length", 0)) {
        return sizes();
    }
    if (header.numbers("ssm.group_count").empty()) {
        return {};
    }
    if (contains(with_mamba2, header.architecture()) &&
        (n_rank < 1 || n_groups < 1 || n_inner % n_rank != 0 || n_inner % n_groups != 0)) {
        return sizes();
    }
    if (contains(with_delta_net, header.architecture()) &&
        (n_rank < 1 || n_groups < 1 || n_rank % n_groups != 0 || n_inner != n_rank * n_state)) {
        return sizes();
    }
    return {};
}

std::string wrong_strings(const Header & header) {
    const gguf_context * gguf = header.gguf();
    const int64_t scaling = gguf_find_key(gguf, (header.architecture() + ".rope.scaling.type").c_str());
    if (scaling >= 0 && gguf_get_kv_type(gguf, scaling) == GGUF_TYPE_STRING) {
        constexpr std::array known = {"none", "linear", "yarn", "longrope"};
        const std::string type = gguf_get_val_str(gguf, scaling);
        if (!contains(known, type)) {
            return "names a rope.scaling.type '" + type + "' that llama.cpp does not know";
        }
    }
    const int64_t tokens = gguf_find_key(gguf, "tokenizer.ggml.tokens");
    if (tokens < 0 || gguf_get_kv_type(gguf, tokens) != GGUF_TYPE_ARRAY ||
        gguf_get_arr_type(gguf, tokens) != GGUF_TYPE_STRING) {
        return {};
    }
    const size_t n = gguf_get_arr_n(gguf, tokens);
    if (n == 0) {
        return "has an empty list of tokens";
    }
    std::unordered_set<std::string_view> seen;
    seen.reserve(n);
    std::deque<std::string> names; // of tokens without a text, as llama.cpp calls them
    for (size_t i = 0; i < n; i++) {
        std::string_view text = gguf_get_arr_str(gguf, tokens, i);
        if (text.empty()) {
            text = names.emplace_back("[EMPTY_" + std::to_string(i) + "]");
        }
        if (!seen.insert(text).second) {
            return "has the token '" + std::string(text) + "' twice";
        }
    }
    return {};
}

// The CPU multiplies with tensors of any type that can be dequantised, but scales, shifts and convolves with F32 alone.
std::string wrong_types(const Header & header) {
    for (int64_t i = 0; i < gguf_get_n_tensors(header.gguf()); i++) {
        const std::string_view name = gguf_get_tensor_name(header.gguf(), i);
        const ggml_type type = gguf_get_tensor_type(header.gguf(), i);
        const bool is_number = ends_with(name, "d2t") || name.find("tid2eid") != name.npos; // ids, not weights
        const bool is_vector = !ends_with(name, ".weight") || name.find("norm") != name.npos ||
                               ends_with(name, "ssm_conv1d.weight") || ends_with(name, "shortconv.conv.weight") ||
                               ends_with(name, "rope_freqs.weight") || ends_with(name, "attn_sinks.weight") ||
                               ends_with(name, "layer_output_scale.weight");
        const bool is_weight = type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 ||
                               (ggml_is_quantized(type) && type != GGML_TYPE_Q8_1 && type != GGML_TYPE_Q8_K);
        if (!is_number && (is_vector ? type != GGML_TYPE_F32 : !is_weight)) {
            return "has the tensor " + std::string(name) + " of type " + ggml_type_name(type) +
                   ", which cannot be computed with";
        }
    }
    return {};
}

} // namespace

std::string header_problem(const gguf_context * gguf, const std::string & architecture) {
    const Header header(gguf, architecture);
    for (const auto check :
         {outside_limits, wrong_width, wrong_experts, wrong_heads, wrong_recurrence, wrong_strings, wrong_types}) {
        std::string why = check(header);
        if (!why.empty()) {
            return why;
        }
    }
    return {};
}

bool rotates_in_sections(const gguf_context * gguf, const std::string & architecture) {
    const std::vector<double> sections = Header(gguf, architecture).numbers("rope.dimension_sections");
    return sections.size() > 1 && sections[0] > 0 && sections[1] > 0; // llama.cpp's own criterion
}

} // namespace pyfly
