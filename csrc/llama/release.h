// What depends on the release of llama.cpp and what no header tells: architectures with peculiarities, and which
// releases know them. release_ggml.h and release_llama.h have the declarations that a release can change.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace pyfly {

// That this is compiled against: 336 is 0.3.36.
constexpr int32_t release = PYFLY_RELEASE;
// Before it, llama.cpp copies samplers with penalties without their counts, and Mirostat onto itself.
constexpr int32_t oldest_release = 335;

// Names of llama.cpp's, with the first release that knows them.
struct Since {
    int32_t release;
    std::vector<std::string> names;
};

// The first that reads heads that draft blocks (DFlash, DSpark) as they are written. Those before load them, and hardly
// a draft is right.
constexpr int32_t first_with_block_heads = 336;

// "0.3.36" for 336.
inline std::string release_name(int32_t number) {
    return "0." + std::to_string(number / 100) + "." + std::to_string(number % 100);
}

inline bool is_known(const std::vector<Since> & table, const std::string & name) {
    return std::any_of(table.begin(), table.end(), [&](const Since & row) {
        return release >= row.release && std::find(row.names.begin(), row.names.end(), name) != row.names.end();
    });
}

template <size_t n> bool contains(const std::array<const char *, n> & names, const std::string & name) {
    return std::any_of(names.begin(), names.end(), [&](const char * one) { return name == one; });
}

// ---- Architectures -----------------------------------------------------------------------------------------------

// Architectures whose graph publishes the inputs of its layers; another one aborts when they are asked for.
inline const std::vector<Since> publishing = {
    {oldest_release,
     {"deepseek4", "gemma4", "gpt-oss", "llama", "minimax-01", "minimax-m2", "muse-glimmer", "nemotron_h",
      "nemotron_h_moe", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next"}},
    {336, {"bailingmoe3", "hunyuan-dense", "hunyuan_vl", "lfm2", "lfm2moe", "mimo2", "nanbeige", "qwen4exp"}},
};

// Architectures for which llama.cpp has a graph of the NextN blocks; another one would be given the trunk's graph.
inline const std::vector<Since> with_graph = {
    {oldest_release,
     {"cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "hy_v3", "mimo2", "nemotron_h_moe", "qwen35",
      "qwen35moe", "qwen3next", "step35"}},
    {336, {"bailingmoe3", "glm4moe"}},
};
// Those of with_graph whose graph runs the block that is selected. The others abort where there is more than one.
inline constexpr std::array with_chain = {"hy_v3", "mimo2", "step35"};
// Those whose graph of the blocks rotates plainly where the trunk's rotates in sections, and then aborts.
inline constexpr std::array without_sections = {"glm4moe"};

// Those that divide by the number of experts that are used.
inline constexpr std::array with_experts = {"qwen35moe", "qwen3next", "qwen4exp"};
// Those that always rotate in sections, and so end the process over sections of nothing. llama.cpp writes such sections
// into every model that it saves.
inline constexpr std::array with_sections = {"paddleocr", "qwen2vl", "qwen35",     "qwen35moe",
                                             "qwen3tts",  "qwen3vl", "qwen3vlmoe", "qwen4exp"};
inline constexpr int64_t most_layers = 512; // that llama.cpp has room for
// Has heads and does not rotate, and says so with rope.dimension_count = 0, over which others hang.
inline constexpr const char * without_rope = "glm5-next";

// Architectures whose graph gives the wrong rows for batches of several tokens.
struct WrongRows {
    const char *architecture, *why, *remedy;
};
inline constexpr std::array with_wrong_rows = {
    WrongRows{"chameleon",
              "hides its image tokens in the first row of a batch alone and ends the process over a batch without rows",
              "use llama_cpp.Llama"},
    WrongRows{"cogvlm", "gives the rows of a batch's first tokens, whichever are asked for", "choose another model"},
};

} // namespace pyfly
