// Stands in for the header of the same name in llama.cpp's common/, which llama-cpp-python does not install: what the
// generator of models writes while it works goes nowhere.
#pragma once

#include <cstdio>

#define LOG_LEVEL_DEBUG 5
#define LOG_LEVEL_ERROR 1
#define LOG(...) ((void) 0)
#define LOG_INF(...) ((void) 0)
#define LOG_ERR(...) std::fprintf(stderr, __VA_ARGS__)
