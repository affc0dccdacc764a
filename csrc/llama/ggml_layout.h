// Whether the ggml that is loaded is laid out as release_ggml.h says. It is asked through its public functions, and
// meets structures and objects of ours, each of whose functions only notes its place and its arguments: nothing of
// ggml's is written to before it has turned out to be what it is taken for.
#pragma once

#include <string>
#include <vector>

#include "ggml-backend.h"
#include "release_ggml.h"

namespace pyfly {

// What is not as in release_ggml.h, to follow "kernels: ", before anything of it is used: the version of the
// interface, buffers and their types. Empty: all of it is.
std::string unknown_buffers();

// ggml's list of extra buffer types; null if the function returns something else.
std::vector<ggml_backend_buffer_type_t> * list_of(ggml_internal::ExtraBufferTypes function);

// For the `context` of a buffer type in that list: takes no weights and no operation.
void * takes_nothing();

// The same as unknown_buffers() of what is called while a graph is computed: the functions of TensorTraits and
// ExtraBufferType, and ComputeParams. The type is in the list and takes_nothing(). Computes one small product, on one
// thread. Throws Error(PYFLY_STATUS_NATIVE) if ggml cannot.
std::string unknown_operations(ggml_internal::BufferType * type);

} // namespace pyfly
