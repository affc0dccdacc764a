// What is found about the layout of the ggml that this is linked with: a line for buffers and, if they are known, one
// for operations.

#include "ggml_layout.h"

#include <cstdio>

#include "ggml-cpu.h"

using namespace pyfly;

void * extra_buffer_types(void *) __asm__("_Z39ggml_backend_cpu_get_extra_buffer_typesv");

int main() {
    const std::string buffers = unknown_buffers();
    std::printf("%s\n", buffers.c_str());
    auto * types = buffers.empty() ? list_of(extra_buffer_types) : nullptr;
    if (types == nullptr) {
        return buffers.empty();
    }
    ggml_internal::BufferType type = {};
    type.device = ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0);
    type.context = takes_nothing();
    types->insert(types->begin(), reinterpret_cast<ggml_backend_buffer_type_t>(&type));
    std::printf("%s\n", unknown_operations(&type).c_str());
    return 0;
}
