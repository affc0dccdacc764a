#include "ggml_layout.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>

#include "abort_guard.h"
#include "error.h"
#include "ggml-cpu.h"

namespace pyfly {

namespace {

using namespace ggml_internal;

// ---- Functions that note how they are called ------------------------------------------------------------------------

struct Call {
    size_t place;           // of the function in its table
    uintptr_t arguments[4]; // the first is the structure or object; of those that it does not have any value
};
using Listener = std::function<uintptr_t(const Call &)>;
thread_local const Listener * listener = nullptr; // null: every function returns 0

class Listening {
  public:
    explicit Listening(const Listener & own) { listener = &own; }
    ~Listening() { listener = nullptr; }
    Listening(const Listening &) = delete;
    Listening & operator=(const Listening &) = delete;
};

template <size_t place> uintptr_t noted(uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d) {
    return listener == nullptr ? 0 : (*listener)({place, {a, b, c, d}});
}

using Function = uintptr_t (*)(uintptr_t, uintptr_t, uintptr_t, uintptr_t);

template <size_t... places> constexpr std::array<Function, sizeof...(places)> table(std::index_sequence<places...>) {
    return {noted<places>...};
}
constexpr std::array<Function, 16> functions = table(std::make_index_sequence<16>());

// What the compiler makes of an object with virtual functions: a pointer to their table.
const Function * taking_nothing = functions.data();
const Function * operation = functions.data();

uintptr_t number(const void * pointer) {
    return reinterpret_cast<uintptr_t>(pointer);
}

// The place of a virtual function in its table, which is how the compiler writes a pointer to it: in bytes, and on
// other processors than ARM's plus one (section 2.3 of the Itanium C++ ABI; ARM's C++ ABI for AArch64 marks it
// elsewhere).
template <class Member> size_t place_of(Member member) {
    uintptr_t word;
    std::memcpy(&word, &member, sizeof(word));
    return word / sizeof(Function);
}

// A structure of ggml's with all its functions noted, and room behind it.
template <class Structure> struct Noted {
    alignas(Structure) std::array<uintptr_t, sizeof(Structure) / sizeof(uintptr_t) + 16> words = {};

    Noted() { std::memcpy(words.data(), functions.data(), sizeof(Structure::functions)); }
    Structure & get() { return *reinterpret_cast<Structure *>(words.data()); }
};

// Whether `ask` makes ggml call the function of `self` at this offset, once, and no other.
template <class Ask> bool calls(const void * self, size_t offset, uintptr_t answer, Ask ask) {
    size_t n_right = 0, n = 0;
    const Listener count = [&](const Call & call) -> uintptr_t {
        if (call.arguments[0] != number(self)) {
            return 0;
        }
        n++;
        n_right += call.place == offset / sizeof(Function);
        return answer;
    };
    const Listening listening(count);
    ask();
    return n == 1 && n_right == 1;
}

// ---- Buffers --------------------------------------------------------------------------------------------------------

struct Free {
    void operator()(ggml_context * context) const { ggml_free(context); }
    void operator()(ggml_threadpool * pool) const { ggml_threadpool_free(pool); }
};
using Context = std::unique_ptr<ggml_context, Free>;

Context make_context() {
    Context context(ggml_init({8 * ggml_tensor_overhead() + ggml_graph_overhead() + 4096, nullptr, false}));
    if (!context) {
        throw Error(PYFLY_STATUS_NATIVE, "ggml has no memory to try the kernels");
    }
    return context;
}

bool has_known_types(const ggml_tensor * tensor) {
    Noted<BufferType> noted;
    BufferType & own = noted.get();
    own.device = reinterpret_cast<ggml_backend_dev_t>(&own);
    const auto type = reinterpret_cast<ggml_backend_buffer_type_t>(&own);
    using Of = BufferTypeFunctions;
    return ggml_backend_buft_get_device(type) == own.device && // else nothing more is asked
           calls(type, offsetof(Of, get_name), number("noted"), [&] { ggml_backend_buft_name(type); }) &&
           calls(type, offsetof(Of, alloc_buffer), 0, [&] { ggml_backend_buft_alloc_buffer(type, 64); }) &&
           calls(type, offsetof(Of, get_alignment), 64, [&] { ggml_backend_buft_get_alignment(type); }) &&
           calls(type, offsetof(Of, get_max_size), 64, [&] { ggml_backend_buft_get_max_size(type); }) &&
           calls(type, offsetof(Of, get_alloc_size), ggml_nbytes(tensor),
                 [&] { ggml_backend_buft_get_alloc_size(type, tensor); }) &&
           calls(type, offsetof(Of, is_host), 0, [&] { ggml_backend_buft_is_host(type); });
}

bool has_known_buffers(ggml_tensor * tensor, ggml_tensor * other) {
    Noted<BufferType> noted_type;
    Noted<Buffer> noted;
    Buffer & own = noted.get();
    own.type = reinterpret_cast<ggml_backend_buffer_type_t>(&noted_type);
    own.size = 4096;
    own.usage = GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
    const auto buffer = reinterpret_cast<ggml_backend_buffer_t>(&own);
    if (ggml_backend_buffer_get_type(buffer) != own.type || ggml_backend_buffer_get_size(buffer) != own.size ||
        ggml_backend_buffer_get_usage(buffer) != own.usage) {
        return false; // and nothing more is asked
    }
    tensor->buffer = other->buffer = buffer;
    std::array<float, 8> data = {};
    constexpr size_t half = sizeof(data) / 2;
    using Of = BufferFunctions; // free_buffer is not asked: ggml would free our structure, too
    const bool is_known =
        calls(buffer, offsetof(Of, get_base), number(data.data()), [&] { ggml_backend_buffer_get_base(buffer); }) &&
        calls(buffer, offsetof(Of, init_tensor), 0, [&] { ggml_backend_buffer_init_tensor(buffer, tensor); }) &&
        calls(buffer, offsetof(Of, memset_tensor), 0, [&] { ggml_backend_tensor_memset(tensor, 0, 0, half); }) &&
        calls(buffer, offsetof(Of, set_tensor), 0, [&] { ggml_backend_tensor_set(tensor, data.data(), 0, half); }) &&
        calls(buffer, offsetof(Of, get_tensor), 0, [&] { ggml_backend_tensor_get(tensor, data.data(), 0, half); }) &&
        calls(buffer, offsetof(Of, set_tensor_2d), 0,
              [&] { ggml_backend_tensor_set_2d(tensor, data.data(), 0, 4, 2, half, half); }) &&
        calls(buffer, offsetof(Of, get_tensor_2d), 0,
              [&] { ggml_backend_tensor_get_2d(tensor, data.data(), 0, 4, 2, half, half); }) &&
        calls(buffer, offsetof(Of, cpy_tensor), 1, [&] { ggml_backend_tensor_copy(other, tensor); }) &&
        calls(buffer, offsetof(Of, clear), 0, [&] { ggml_backend_buffer_clear(buffer, 0); }) &&
        calls(buffer, offsetof(Of, reset), 0, [&] { ggml_backend_buffer_reset(buffer); });
    tensor->buffer = other->buffer = nullptr;
    return is_known;
}

// Ours are copies of ggml's own, with some functions replaced.
bool has_known_base() {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), 192);
    if (buffer == nullptr) {
        return false;
    }
    const Buffer & own = *reinterpret_cast<const Buffer *>(buffer);
    const BufferFunctions & has = own.functions;
    const bool is_known = own.type == ggml_backend_cpu_buffer_type() && own.size == 192 && has.free_buffer != nullptr &&
                          has.get_base != nullptr && has.memset_tensor != nullptr && has.set_tensor != nullptr &&
                          has.clear != nullptr && own.context == ggml_backend_buffer_get_base(buffer);
    ggml_backend_buffer_free(buffer);
    return is_known;
}

// ---- Operations -----------------------------------------------------------------------------------------------------

// Whether there is a structure of ggml's where an argument points to: on the stack of this thread.
bool is_on_stack(uintptr_t address) {
    const uintptr_t here = number(__builtin_frame_address(0)),
                    distance = address > here ? address - here : here - address;
    return distance < (uintptr_t{1} << 20) && address % alignof(void *) == 0;
}

// What an operation must be called with.
struct Expected {
    const ggml_tensor * op;
    ggml_backend_dev_t device;
    ggml_cplan plan;
    bool was_offered = false, was_computed = false;

    static constexpr size_t work_size = 123464; // that is promised

    uintptr_t answer(const Call & call) {
        const auto [extra, a, b, c] = call.arguments;
        if (extra == number(&taking_nothing)) {
            if (call.place == place_of(&ExtraBufferType::supports_op)) {
                was_offered |= a == number(device) && b == number(op);
            }
            const bool is_ours = call.place == place_of(&ExtraBufferType::get_tensor_traits) && a == number(op);
            return is_ours ? number(&operation) : 0;
        }
        if (extra != number(&operation) || b != number(op)) {
            return 0;
        }
        if (call.place == place_of(&TensorTraits::work_size)) {
            size_t * size = reinterpret_cast<size_t *>(c);
            if (static_cast<int>(a) != 1 || !is_on_stack(c) || *size != 0) {
                return 0;
            }
            *size = work_size;
            return 1;
        }
        if (call.place != place_of(&TensorTraits::compute_forward) || !is_on_stack(a)) {
            return 0;
        }
        ComputeParams params;
        std::memcpy(&params, reinterpret_cast<const void *>(a), sizeof(params));
        was_computed = params.thread == 0 && params.n_threads == 1 && params.work_size == plan.work_size &&
                       params.work == plan.work_data && params.pool == plan.threadpool;
        return was_computed ? 1 : 0;
    }
};

} // namespace

std::string unknown_buffers() {
    int api_version;
    std::memcpy(&api_version, ggml_backend_cpu_reg(), sizeof(api_version));
    if (api_version != known_api_version) {
        return "the backends of this build of llama.cpp have version " + std::to_string(api_version) +
               " of ggml's interface, and only version " + std::to_string(known_api_version) + " is known";
    }
    const Context context = make_context();
    ggml_tensor * tensor = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, 8);
    ggml_tensor * other = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, 8);
    bool is_known = false;
    try {
        const AbortGuard guard;
        is_known = has_known_types(tensor) && has_known_buffers(tensor, other) && has_known_base();
    } catch (const std::exception &) { // ggml met what it did not expect, either
    }
    return is_known ? "" : "the structures of this build of llama.cpp are not known";
}

std::vector<ggml_backend_buffer_type_t> * list_of(ExtraBufferTypes function) {
    std::array<uintptr_t, 32> space = {}; // where a function that returned the list itself would write it
    auto * list = static_cast<std::vector<ggml_backend_buffer_type_t> *>(function(space.data()));
    if (list == nullptr || number(list) == number(space.data()) || number(list) % alignof(void *) != 0) {
        return nullptr;
    }
    constexpr size_t most = 64;
    const ggml_backend_dev_t device = ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0);
    bool is_known = list->size() <= list->capacity() && list->capacity() <= most;
    for (size_t i = 0; is_known && i < list->size(); i++) {
        is_known = (*list)[i] != nullptr && ggml_backend_buft_get_device((*list)[i]) == device;
    }
    return is_known ? list : nullptr;
}

void * takes_nothing() {
    return &taking_nothing;
}

std::string unknown_operations(BufferType * type) {
    const Context context = make_context();
    ggml_tensor * weights = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, 8, 1);
    ggml_tensor * x = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, 8, 1);
    std::memset(weights->data, 0, ggml_nbytes(weights));
    std::memset(x->data, 0, ggml_nbytes(x));
    ggml_tensor * op = ggml_mul_mat(context.get(), weights, x);
    ggml_cgraph * graph = ggml_new_graph(context.get());
    ggml_build_forward_expand(graph, op);
    ggml_threadpool_params params = ggml_threadpool_params_default(1);
    const std::unique_ptr<ggml_threadpool, Free> pool(ggml_threadpool_new(&params));

    Expected expected = {op, type->device, {}};
    const Listener answer = [&](const Call & call) { return expected.answer(call); };
    const Listening listening(answer);
    try {
        const AbortGuard guard;
        Buffer empty = {{}, reinterpret_cast<ggml_backend_buffer_type_t>(type), nullptr, 0, {}};
        weights->buffer = reinterpret_cast<ggml_backend_buffer_t>(&empty);
        (void) ggml_backend_dev_supports_op(type->device, op);
        weights->buffer = nullptr;
        expected.plan = ggml_graph_plan(graph, 1, pool.get());
        constexpr size_t most_added = 4096; // by ggml, to keep threads out of each other's cache lines
        if (expected.plan.work_size - Expected::work_size <= most_added) {
            std::vector<uint8_t> work(expected.plan.work_size);
            expected.plan.work_data = work.data();
            ggml_graph_compute(graph, &expected.plan);
        }
    } catch (const std::exception &) {
    }
    return expected.was_offered && expected.was_computed
               ? ""
               : "the operations of this build of llama.cpp are called in a way that is not known";
}

} // namespace pyfly
