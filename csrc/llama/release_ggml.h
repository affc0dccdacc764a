// What ggml keeps out of its public headers (ggml/src/ggml-backend-impl.h and ggml/src/ggml-cpu of its source) and a
// buffer type of the CPU backend needs. These are declarations of what is there, not of what is promised: ggml_layout.h
// compares them with the library that is loaded before anything relies on them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ggml-backend.h"
#include "ggml.h"

namespace pyfly::ggml_internal {

// The version of the interface of ggml's backends that these belong to (GGML_BACKEND_API_VERSION).
constexpr int known_api_version = 2;

struct BufferTypeFunctions {
    const char * (*get_name)(ggml_backend_buffer_type_t type);
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t type, size_t size);
    size_t (*get_alignment)(ggml_backend_buffer_type_t type);
    size_t (*get_max_size)(ggml_backend_buffer_type_t type);
    size_t (*get_alloc_size)(ggml_backend_buffer_type_t type, const ggml_tensor * tensor);
    bool (*is_host)(ggml_backend_buffer_type_t type);
};

struct BufferType { // ggml_backend_buffer_type
    BufferTypeFunctions functions;
    ggml_backend_dev_t device;
    void * context;
};

struct BufferFunctions {
    void (*free_buffer)(ggml_backend_buffer_t buffer);
    void * (*get_base)(ggml_backend_buffer_t buffer);
    ggml_status (*init_tensor)(ggml_backend_buffer_t buffer, ggml_tensor * tensor);
    void (*memset_tensor)(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset,
                          size_t size);
    void (*set_tensor)(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset,
                       size_t size);
    void (*get_tensor)(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset,
                       size_t size);
    void (*set_tensor_2d)(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset,
                          size_t size, size_t n_copies, size_t stride_tensor, size_t stride_data);
    void (*get_tensor_2d)(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset,
                          size_t size, size_t n_copies, size_t stride_tensor, size_t stride_data);
    bool (*cpy_tensor)(ggml_backend_buffer_t buffer, const ggml_tensor * from, ggml_tensor * to);
    void (*clear)(ggml_backend_buffer_t buffer, uint8_t value);
    void (*reset)(ggml_backend_buffer_t buffer);
};

struct Buffer { // ggml_backend_buffer
    BufferFunctions functions;
    ggml_backend_buffer_type_t type;
    void * context;
    size_t size;
    ggml_backend_buffer_usage usage;
};

struct ComputeParams { // ggml_compute_params
    int thread, n_threads;
    size_t work_size;
    void * work; // of all threads
    struct ggml_threadpool * pool;
    bool use_reference;
};

// ggml::cpu::tensor_traits and ggml::cpu::extra_buffer_type: the same virtual functions in the same order.
class TensorTraits {
  public:
    virtual ~TensorTraits() = default;
    virtual bool work_size(int n_threads, const ggml_tensor * op, size_t & size) = 0;
    virtual bool compute_forward(ComputeParams * params, ggml_tensor * op) = 0;
};

class ExtraBufferType {
  public:
    virtual ~ExtraBufferType() = default;
    virtual bool supports_op(ggml_backend_dev_t device, const ggml_tensor * op) = 0;
    virtual TensorTraits * get_tensor_traits(const ggml_tensor * op) = 0;
};

// Functions that libggml-cpu exports, in builds that export anything.
using ExtraBufferTypes = void * (*) (void * unused); // a reference to a vector, see list_of()
using Barrier = void (*)(struct ggml_threadpool * pool);
using SetChunk = void (*)(struct ggml_threadpool * pool, int value);
using AddChunk = int (*)(struct ggml_threadpool * pool, int value); // the value before

} // namespace pyfly::ggml_internal
