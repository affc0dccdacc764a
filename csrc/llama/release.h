// Which releases of llama-cpp-python can do what no header tells.
#pragma once

#include <algorithm>
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

inline bool is_known(const std::vector<Since> & table, const std::string & name) {
    return std::any_of(table.begin(), table.end(), [&](const Since & row) {
        return release >= row.release && std::find(row.names.begin(), row.names.end(), name) != row.names.end();
    });
}

} // namespace pyfly
