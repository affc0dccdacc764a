#include "packed_buffers.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#ifndef _WIN32
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "cpu_attention.h"
#include "file_pages.h"
#include "ggml-cpu.h"
#include "ggml_layout.h"
#include "kernels/packing.h"
#include "kernels/products.h"
#include "release_ggml.h"
#include "state_clearer.h"

namespace pyfly {

namespace {

using namespace ggml_internal;
using kernels::Products;
using kernels::WeightType;

struct Library { // what of it is called
    ExtraBufferTypes extra_buffer_types;
    Barrier barrier;
    SetChunk set_chunk;
    AddChunk add_chunk;
} library;

std::atomic<uint64_t> taken_everywhere = 0;
thread_local PackedBuffers::Taking * taking_here = nullptr;

uint64_t taken() {
    return taking_here != nullptr ? taking_here->what : taken_everywhere.load();
}

BufferType * packed_type(); // null: not installed

bool is_packed(const ggml_backend_buffer_t buffer) {
    return buffer != nullptr && reinterpret_cast<const Buffer *>(buffer)->type ==
                                    reinterpret_cast<ggml_backend_buffer_type_t>(packed_type());
}

// What a packed buffer has for its context, instead of the memory that a buffer of the CPU has there. It stays as it
// was made: graphs are planned and computed by it.
struct Content {
    void * memory;
    bool takes_attention;
    bool is_locked;
    void (*free)(ggml_backend_buffer_t buffer); // a buffer of the CPU
};

// Null for llama.cpp's empty buffer, of a model without weights.
const Content * content_of(const ggml_backend_buffer_t buffer) {
    return static_cast<const Content *>(reinterpret_cast<const Buffer *>(buffer)->context);
}

WeightType type_of(const ggml_tensor * weights) {
    return static_cast<WeightType>(weights->type);
}

constexpr int64_t most_f32_outputs = 1024; // routers of experts have fewer; llama.cpp is faster with large matrices

// Whether these weights are packed: matrices, or matrices of experts.
bool can_pack(const ggml_tensor * weights) {
    return weights->ne[3] == 1 && weights->view_src == nullptr &&
           (weights->type != GGML_TYPE_F32 || weights->ne[1] <= most_f32_outputs) &&
           kernels::products(type_of(weights), 1) != nullptr &&
           kernels::can_pack(type_of(weights), static_cast<size_t>(weights->ne[0]),
                             static_cast<size_t>(weights->ne[1]));
}

size_t matrix_bytes(const ggml_tensor * weights) {
    return kernels::panel_bytes(type_of(weights), static_cast<size_t>(weights->ne[0])) *
           kernels::n_panels(static_cast<size_t>(weights->ne[1]));
}

// ---- Multiplying ----------------------------------------------------------------------------------------------------

// Where row r of a batch is, counted over three dimensions.
template <class Byte> Byte * row_at(Byte * data, const ggml_tensor * tensor, int64_t r) {
    const int64_t i1 = r % tensor->ne[1], i2 = r / tensor->ne[1] % tensor->ne[2],
                  i3 = r / (tensor->ne[1] * tensor->ne[2]);
    return data + static_cast<size_t>(i1) * tensor->nb[1] + static_cast<size_t>(i2) * tensor->nb[2] +
           static_cast<size_t>(i3) * tensor->nb[3];
}

// Row `r` of x[n_in] in one piece.
const float * read_row(const ggml_tensor * x, int64_t r, std::vector<float> & gathered) {
    const char * row = row_at(static_cast<const char *>(x->data), x, r);
    if (x->nb[0] == sizeof(float)) {
        return reinterpret_cast<const float *>(row);
    }
    gathered.resize(static_cast<size_t>(x->ne[0]));
    for (size_t i = 0; i < gathered.size(); i++) {
        std::memcpy(&gathered[i], row + i * x->nb[0], sizeof(float));
    }
    return gathered.data();
}

// Quantises row `r` of n rows in a run of strips.
void quantise_row(const Products & products, const float * x, size_t n_in, int32_t * strips, size_t n, size_t r) {
    const size_t first = r / products.strip_rows * products.strip_rows;
    products.quantise(x, n_in, strips + first * products.row_words(n_in),
                      static_cast<int>(std::min(products.strip_rows, n - first)), static_cast<int>(r - first));
}

// Runs of strips in the work memory, one for each matrix, which are aligned.
class Runs {
  public:
    Runs(void * memory, size_t words) : begin_(up(reinterpret_cast<uintptr_t>(memory))), words_(words) {}

    // The run of matrix `i`, before which there are n rows. Rows have at most `words` words.
    int32_t * of(size_t i, size_t n) const {
        return reinterpret_cast<int32_t *>(begin_ + up(n * words_ * sizeof(int32_t)) + i * kernels::strip_alignment);
    }

    // Bytes of work memory for n rows of n_matrices.
    static size_t bytes(size_t n_matrices, size_t n, size_t words) {
        return n * words * sizeof(int32_t) + (n_matrices + 2) * kernels::strip_alignment + kernels::read_behind;
    }

  private:
    uintptr_t begin_;
    size_t words_;

    static uintptr_t up(uintptr_t address) {
        constexpr uintptr_t to = kernels::strip_alignment;
        return (address + to - 1) / to * to;
    }
};

// Panels begin..end - 1 of a matrix times n rows of strips; `row_out(r)` is where outputs of row r go.
template <class RowOut>
void multiply_panels(const Products & products, const ggml_tensor * matrix, const uint8_t * weights,
                     const int32_t * strips, size_t n, size_t begin, size_t end, RowOut row_out) {
    const size_t n_in = static_cast<size_t>(matrix->ne[0]), n_out = static_cast<size_t>(matrix->ne[1]);
    const size_t panel_bytes = kernels::panel_bytes(type_of(matrix), n_in);
    const size_t n_whole = std::min(end, n_out / kernels::panel) - begin; // of whole panels; the last has fewer outputs
    float * out[kernels::most_rows];
    float last[kernels::most_rows][kernels::panel];
    for (size_t first = 0; first < n; first += products.rows_together) {
        const size_t n_now = std::min(products.rows_together, n - first);
        const int32_t * rows = strips + first * products.row_words(n_in);
        for (size_t r = 0; r < n_now; r++) {
            out[r] = row_out(first + r) + begin * kernels::panel;
        }
        if (n_whole > 0) {
            products.multiply(weights + begin * panel_bytes, n_whole, n_in, rows, n_now, out);
        }
        if (begin + n_whole < end) {
            const size_t at = begin + n_whole;
            for (size_t r = 0; r < n_now; r++) {
                out[r] = last[r];
            }
            products.multiply(weights + at * panel_bytes, 1, n_in, rows, n_now, out);
            for (size_t r = 0; r < n_now; r++) {
                std::copy_n(last[r], n_out - at * kernels::panel, row_out(first + r) + at * kernels::panel);
            }
        }
    }
}

// Cuts n_panels * n_matrices panels into chunks that threads take in turns. A thread that is behind takes fewer.
template <class Work> void share(const ComputeParams & params, size_t n_panels, size_t n_matrices, Work work) {
    const size_t n_threads = static_cast<size_t>(params.n_threads);
    const size_t size = std::max(n_panels * n_matrices / (n_threads * 8), size_t{1});
    const size_t n_each = (n_panels + size - 1) / size; // chunks of a matrix
    for (size_t chunk = static_cast<size_t>(params.thread); chunk < n_each * n_matrices;
         chunk = static_cast<size_t>(library.add_chunk(params.pool, 1))) {
        const size_t begin = chunk % n_each * size;
        work(chunk / n_each, begin, std::min(begin + size, n_panels));
    }
}

class PackedTraits : public TensorTraits {
  public:
    bool work_size(int, const ggml_tensor * op, size_t & size) override {
        const ggml_tensor * weights = op->src[0];
        const size_t words = kernels::most_row_words(type_of(weights), static_cast<size_t>(weights->ne[0]));
        const size_t n = static_cast<size_t>(op->ne[1] * op->ne[2] * op->ne[3]);
        const size_t n_matrices = static_cast<size_t>(weights->ne[2] * weights->ne[3]);
        size = Runs::bytes(n_matrices, n, words);
        if (op->op == GGML_OP_MUL_MAT_ID) {
            size += (n + 2 * n_matrices + 1) * sizeof(int32_t);
        }
        return true;
    }

    bool compute_forward(ComputeParams * params, ggml_tensor * op) override {
        if (op->op == GGML_OP_MUL_MAT) {
            multiply(*params, op);
        } else {
            multiply_experts(*params, op);
        }
        return true;
    }

  private:
    // Several matrices share the rows' third and fourth dimension evenly: each has a run of strips of its own.
    static void multiply(const ComputeParams & params, ggml_tensor * op) {
        const ggml_tensor *weights = op->src[0], *x = op->src[1];
        const size_t n_in = static_cast<size_t>(weights->ne[0]), n_third = static_cast<size_t>(weights->ne[2]),
                     n_matrices = n_third * static_cast<size_t>(weights->ne[3]);
        const size_t n = static_cast<size_t>(op->ne[1] * op->ne[2] * op->ne[3]), n_each = n / n_matrices;
        const Products & products = *kernels::products(type_of(weights), n_each);
        const auto row_of = [&](size_t matrix,
                                size_t i) { // number i of those of a matrix, counted over three dimensions
            const size_t ne1 = static_cast<size_t>(op->ne[1]), ne2 = static_cast<size_t>(op->ne[2]);
            const size_t n_own = ne2 / n_third, n_fourth = static_cast<size_t>(op->ne[3] / weights->ne[3]);
            const size_t i2 = matrix % n_third * n_own + i / ne1 % n_own;
            const size_t i3 = matrix / n_third * n_fourth + i / ne1 / n_own;
            return static_cast<int64_t>(i % ne1 + ne1 * (i2 + ne2 * i3));
        };
        const Runs runs(params.work, products.row_words(n_in));
        std::vector<float> gathered;
        for (size_t r = static_cast<size_t>(params.thread); r < n; r += static_cast<size_t>(params.n_threads)) {
            const size_t matrix = r / n_each, i = r % n_each;
            quantise_row(products, read_row(x, row_of(matrix, i), gathered), n_in, runs.of(matrix, matrix * n_each),
                         n_each, i);
        }
        begin_chunks(params);
        const size_t n_bytes = matrix_bytes(weights);
        share(params, kernels::n_panels(static_cast<size_t>(weights->ne[1])), n_matrices,
              [&](size_t matrix, size_t begin, size_t end) {
                  multiply_panels(products, weights, static_cast<const uint8_t *>(weights->data) + matrix * n_bytes,
                                  runs.of(matrix, matrix * n_each), n_each, begin, end, [&](size_t i) {
                                      return reinterpret_cast<float *>(
                                          row_at(static_cast<char *>(op->data), op, row_of(matrix, i)));
                                  });
              });
    }

    // Each token goes to the experts that op->src[2] names for it: [n_used, n_tokens] int32. The work memory holds
    // where each expert's rows begin, [n_experts + 1]; the experts that have rows, [n_experts]; the rows by expert,
    // [n], row r being token r / n_used and its expert r % n_used; and their runs of strips.
    static void multiply_experts(const ComputeParams & params, ggml_tensor * op) {
        const ggml_tensor *weights = op->src[0], *x = op->src[1], *ids = op->src[2];
        const size_t n_in = static_cast<size_t>(weights->ne[0]), n_experts = static_cast<size_t>(weights->ne[2]);
        const int64_t n_used = ids->ne[0];
        const size_t n = static_cast<size_t>(n_used * ids->ne[1]);
        int32_t * begins = static_cast<int32_t *>(params.work);
        int32_t * busy = begins + n_experts + 1;
        int32_t * rows = busy + n_experts;
        const Runs runs(rows + n, kernels::most_row_words(type_of(weights), n_in));
        const auto expert_of = [&](size_t r) {
            const int64_t used = static_cast<int64_t>(r) % n_used, token = static_cast<int64_t>(r) / n_used;
            int32_t expert;
            std::memcpy(&expert,
                        static_cast<const char *>(ids->data) + static_cast<size_t>(used) * ids->nb[0] +
                            static_cast<size_t>(token) * ids->nb[1],
                        sizeof(expert));
            return static_cast<size_t>(expert);
        };
        if (params.thread == 0) { // counting sort
            std::fill_n(begins, n_experts + 1, 0);
            for (size_t r = 0; r < n; r++) {
                begins[expert_of(r) + 1]++;
            }
            for (size_t e = 0; e < n_experts; e++) {
                begins[e + 1] += begins[e];
            }
            for (size_t r = n; r-- > 0;) {
                rows[--begins[expert_of(r) + 1]] = static_cast<int32_t>(r);
            }
            // Every begin is now one place to the right of where it belongs.
            std::copy(begins + 1, begins + n_experts + 1, begins);
            begins[n_experts] = static_cast<int32_t>(n);
        }
        library.barrier(params.pool);
        size_t n_busy = 0; // each thread writes the same
        for (size_t e = 0; e < n_experts; e++) {
            if (begins[e + 1] > begins[e]) {
                if (params.thread == 0) {
                    busy[n_busy] = static_cast<int32_t>(e);
                }
                n_busy++;
            }
        }
        std::vector<float> gathered;
        for (size_t e = 0; e < n_experts; e++) {
            const size_t first = static_cast<size_t>(begins[e]), n_own = static_cast<size_t>(begins[e + 1]) - first;
            const Products & products = *kernels::products(type_of(weights), n_own);
            for (size_t i = 0; i < n_own; i++) {
                if ((first + i) % static_cast<size_t>(params.n_threads) == static_cast<size_t>(params.thread)) {
                    const int64_t r = rows[first + i];
                    const int64_t row = r / n_used * x->ne[1] + r % n_used % x->ne[1];
                    quantise_row(products, read_row(x, row, gathered), n_in, runs.of(e, first), n_own, i);
                }
            }
        }
        begin_chunks(params);
        const size_t expert_bytes = matrix_bytes(weights);
        share(params, kernels::n_panels(static_cast<size_t>(weights->ne[1])), n_busy,
              [&](size_t k, size_t begin, size_t end) {
                  const size_t e = static_cast<size_t>(busy[k]), first = static_cast<size_t>(begins[e]);
                  const size_t n_own = static_cast<size_t>(begins[e + 1]) - first;
                  multiply_panels(*kernels::products(type_of(weights), n_own), weights,
                                  static_cast<const uint8_t *>(weights->data) + e * expert_bytes, runs.of(e, first),
                                  n_own, begin, end, [&](size_t i) {
                                      return reinterpret_cast<float *>(
                                          row_at(static_cast<char *>(op->data), op, rows[first + i]));
                                  });
              });
    }

    // Every thread's rows are quantised, and chunks can be taken: the first of each thread is its own number.
    static void begin_chunks(const ComputeParams & params) {
        if (params.thread == 0) {
            library.set_chunk(params.pool, params.n_threads);
        }
        library.barrier(params.pool);
    }
} traits;

CpuAttention & attention = *new CpuAttention; // contexts may be freed when the process ends
CellWriter cell_writer(attention.order);
StateClearer state_clearer;
std::atomic<size_t> n_attending = 0; // packed buffers that take attention

// Whether this is a Hadamard transform, as queries to a quantised cache go through it: llama.cpp computes it row by
// row.
bool is_hadamard(const ggml_tensor * product) {
    return product->op == GGML_OP_MUL_MAT && product->op_params[1] == GGML_HINT_SRC0_IS_HADAMARD;
}

// Whether these queries are products of packed weights that take attention: what they went through after that has them
// as its first source, a Hadamard transform as its second.
bool are_attended(const ggml_tensor * queries) {
    while (queries != nullptr && (queries->op != GGML_OP_MUL_MAT || is_hadamard(queries))) {
        queries = queries->src[is_hadamard(queries) ? 1 : 0];
    }
    if (queries == nullptr || !is_packed(queries->src[0]->buffer)) {
        return false;
    }
    const Content * content = content_of(queries->src[0]->buffer);
    return content != nullptr ? content->takes_attention : (taken() & PackedBuffers::attention) != 0;
}

class PackedExtra : public ExtraBufferType {
  public:
    bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) override {
        const ggml_tensor *weights = op->src[0], *x = op->src[1];
        if ((op->op != GGML_OP_MUL_MAT && op->op != GGML_OP_MUL_MAT_ID) || weights == nullptr ||
            !is_packed(whole(weights)->buffer) || !can_pack(whole(weights)) ||
            (op->op == GGML_OP_MUL_MAT && (x->ne[2] % weights->ne[2] != 0 || x->ne[3] % weights->ne[3] != 0)) ||
            x->type != GGML_TYPE_F32 || (x->buffer != nullptr && !ggml_backend_buffer_is_host(x->buffer))) {
            return false;
        }
        // llama.cpp asks with an empty buffer where it would put weights.
        return ggml_backend_buffer_get_size(whole(weights)->buffer) > 0 || (taken() >> weights->type & 1) != 0;
    }

    TensorTraits * get_tensor_traits(const ggml_tensor * op) override {
        if (op->op == GGML_OP_SET_ROWS) { // it takes no work memory and computes nothing: any thread may see it, or not
            return n_attending > 0 && CellWriter::is_write(op) ? &cell_writer : nullptr;
        }
        if (op->op == GGML_OP_FLASH_ATTN_EXT) {
            return are_attended(op->src[0]) && CpuAttention::can_compute(op) ? &attention : nullptr;
        }
        if (op->op == GGML_OP_SCALE) {
            return StateClearer::is_clearing(op) ? &state_clearer : nullptr;
        }
        const bool is_ours =
            (op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID) && is_packed(whole(op->src[0])->buffer);
        return is_ours ? &traits : nullptr;
    }
} extra;

// ---- The buffer type ------------------------------------------------------------------------------------------------

constexpr size_t worth_a_thread = size_t{1} << 20; // bytes

// The panels of a tensor, and the rows of the file that each of them holds.
struct Panels {
    size_t n_in, n_out, n_each, n, row_bytes, packed_bytes; // n_each: of a matrix; n: of all

    explicit Panels(const ggml_tensor * tensor)
        : n_in(static_cast<size_t>(tensor->ne[0])), n_out(static_cast<size_t>(tensor->ne[1])),
          n_each(kernels::n_panels(n_out)), n(n_each * static_cast<size_t>(tensor->ne[2])),
          row_bytes(kernels::row_bytes(type_of(tensor), n_in)),
          packed_bytes(kernels::panel_bytes(type_of(tensor), n_in)) {}

    size_t first_row(size_t p) const { return p / n_each * n_out + p % n_each * kernels::panel; }
    size_t n_rows(size_t p) const { return std::min<size_t>(kernels::panel, n_out - p % n_each * kernels::panel); }
};

void set_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    GGML_ASSERT(offset == 0 && size == ggml_nbytes(tensor) && "packed weights are written as a whole");
    const Panels panels(tensor);
    std::atomic<size_t> next = 0;
    const auto pack = [&] {
        for (size_t p = next++; p < panels.n; p = next++) {
            kernels::pack_panel(type_of(tensor), panels.n_in,
                                static_cast<const uint8_t *>(data) + panels.first_row(p) * panels.row_bytes,
                                panels.n_rows(p), static_cast<uint8_t *>(tensor->data) + p * panels.packed_bytes);
        }
    };
    const int32_t n_given = taking_here == nullptr ? 0 : taking_here->n_threads;
    const size_t n_processors = std::max(std::thread::hardware_concurrency(), 1U);
    const size_t n_most = n_given > 0 ? std::min(static_cast<size_t>(n_given), n_processors) : n_processors;
    std::vector<std::thread> helpers;
    try {
        for (size_t i = 1; i < std::min(n_most, size / worth_a_thread); i++) {
            helpers.emplace_back(pack);
        }
    } catch (const std::exception &) { // the system gives no more threads
    }
    pack();
    for (std::thread & helper : helpers) {
        helper.join();
    }
    release_file_pages(data, size);
}

// What set_tensor() was given: llama.cpp saves models.
void get_tensor(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    const Panels panels(tensor);
    std::vector<uint8_t> rows(panels.row_bytes * kernels::panel);
    for (size_t p = 0; p < panels.n; p++) {
        const size_t first = panels.first_row(p) * panels.row_bytes, n = panels.n_rows(p) * panels.row_bytes;
        const size_t begin = std::max(first, offset), end = std::min(first + n, offset + size);
        if (begin < end) {
            kernels::unpack_panel(type_of(tensor), panels.n_in,
                                  static_cast<const uint8_t *>(tensor->data) + p * panels.packed_bytes,
                                  panels.n_rows(p), rows.data());
            std::memcpy(static_cast<uint8_t *>(data) + (begin - offset), rows.data() + (begin - first), end - begin);
        }
    }
}

void * get_base(ggml_backend_buffer_t buffer) {
    return content_of(buffer)->memory;
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    std::memset(get_base(buffer), value, ggml_backend_buffer_get_size(buffer));
}

const char * type_name(ggml_backend_buffer_type_t) {
    return "PYFLY";
}

size_t alignment(ggml_backend_buffer_type_t) {
    return 64;
}

size_t alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * tensor) {
    return can_pack(tensor) ? matrix_bytes(tensor) * static_cast<size_t>(tensor->ne[2]) : ggml_nbytes(tensor);
}

// Asks the system for huge pages if it has them: weights are read from end to end for every token.
void prefer_huge_pages(void * data, size_t size) {
#ifdef MADV_HUGEPAGE
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + size) / page * page;
    if (begin < end) {
        (void) madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
    }
#else
    (void) data, (void) size;
#endif
}

// Keeps memory from being swapped out. False where the system does not.
bool lock([[maybe_unused]] void * data, [[maybe_unused]] size_t size) {
#ifdef _WIN32
    return false;
#else
    return mlock(data, size) == 0;
#endif
}

void unlock([[maybe_unused]] void * data, [[maybe_unused]] size_t size) {
#ifndef _WIN32
    (void) munlock(data, size);
#endif
}

void free_buffer(ggml_backend_buffer_t buffer) {
    Buffer * own = reinterpret_cast<Buffer *>(buffer);
    const Content content = *content_of(buffer);
    delete content_of(buffer);
    if (content.is_locked) { // memory that goes back to the heap would stay locked
        unlock(content.memory, own->size);
    }
    n_attending -= content.takes_attention ? 1 : 0;
    own->context = content.memory;
    content.free(buffer);
}

ggml_backend_buffer_t alloc(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    if (buffer != nullptr) {
        void * const memory = ggml_backend_buffer_get_base(buffer);
        prefer_huge_pages(memory, size);
        const bool is_wanted_locked = (taken() & PackedBuffers::locked) != 0;
        const bool is_locked = is_wanted_locked && lock(memory, size);
        if (is_wanted_locked && !is_locked && taking_here != nullptr) {
            taking_here->n_unlocked += size;
        }
        const bool takes_attention = (taken() & PackedBuffers::attention) != 0;
        Buffer * own = reinterpret_cast<Buffer *>(buffer);
        own->context = new Content{memory, takes_attention, is_locked, own->functions.free_buffer};
        own->type = type;
        own->functions.free_buffer = free_buffer;
        own->functions.get_base = get_base;
        own->functions.set_tensor = set_tensor;
        own->functions.get_tensor = get_tensor;
        own->functions.set_tensor_2d = nullptr;
        own->functions.get_tensor_2d = nullptr;
        own->functions.cpy_tensor = nullptr;
        own->functions.clear = clear;
        n_attending += takes_attention ? 1 : 0;
    }
    return buffer;
}

// ---- Installing -----------------------------------------------------------------------------------------------------

BufferType * installed = nullptr;
ggml_backend_buffer_type_t * offered = nullptr; // what a model that is loaded may choose from; ends with null

BufferType * packed_type() {
    return installed;
}

template <class Function> bool look_up(Function & out, const char * name) {
#ifdef _WIN32
    (void) name;
    out = nullptr;
#else
    out = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
#endif
    return out != nullptr;
}

std::string try_to_install() {
    if (std::strcmp(kernels::instruction_set(), "none") == 0) {
        return kernels::why_no_instruction_set();
    }
    if (!look_up(library.extra_buffer_types, "_Z39ggml_backend_cpu_get_extra_buffer_typesv") ||
        !look_up(library.barrier, "ggml_barrier") || !look_up(library.set_chunk, "ggml_threadpool_chunk_set") ||
        !look_up(library.add_chunk, "ggml_threadpool_chunk_add")) {
        return "this build of llama.cpp does not export the functions that they need";
    }
    const std::string unknown = unknown_buffers();
    std::vector<ggml_backend_buffer_type_t> * types = unknown.empty() ? list_of(library.extra_buffer_types) : nullptr;
    if (types == nullptr) {
        return unknown.empty() ? "the buffer types of this build of llama.cpp are not known" : unknown;
    }
    const ggml_backend_reg_t registry = ggml_backend_cpu_reg();
    const ggml_backend_dev_t device = ggml_backend_reg_dev_get(registry, 0);
    const auto list = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(registry, "ggml_backend_dev_get_extra_bufts"));
    if (list == nullptr) {
        return "this build of llama.cpp has no extra buffer types";
    }
    auto * type = new BufferType{{type_name, alloc, alignment, nullptr, alloc_size, nullptr}, device, takes_nothing()};
    types->insert(types->begin(), reinterpret_cast<ggml_backend_buffer_type_t>(type));
    offered = list(device);
    if (offered[0] != types->front()) { // it is read once
        types->erase(types->begin());
        delete type;
        return "a model was loaded before pyfly_cpp was imported";
    }
    installed = type;
    attention.barrier = library.barrier;
    attention.set_chunk = library.set_chunk;
    attention.add_chunk = library.add_chunk;
    return {};
}

std::string try_to_enable() {
    std::string why_not = PackedBuffers::install();
    if (why_not.empty()) {
        why_not = unknown_operations(installed);
    }
    if (why_not.empty()) {
        installed->context = static_cast<ExtraBufferType *>(&extra);
    }
    return why_not;
}

} // namespace

std::string PackedBuffers::install() {
    static const std::string why_not = try_to_install();
    return why_not;
}

std::string PackedBuffers::enable() {
    static const std::string why_not = try_to_enable();
    return why_not;
}

PackedBuffers::Taking::Taking(uint64_t what, int32_t n_threads)
    : what(what), n_threads(n_threads), before_(taking_here) {
    taking_here = this;
}

PackedBuffers::Taking::~Taking() {
    taking_here = before_;
}

void PackedBuffers::take_everywhere(uint64_t what) {
    taken_everywhere = what;
}

ggml_backend_buffer_type_t PackedBuffers::type() {
    return reinterpret_cast<ggml_backend_buffer_type_t>(installed);
}

bool PackedBuffers::computes(const ggml_tensor * op) {
    return installed != nullptr && extra.get_tensor_traits(op) != nullptr;
}

bool PackedBuffers::leave_out(const char * name) {
    if (installed == nullptr) {
        return false;
    }
    size_t n_kept = 0;
    for (size_t i = 0; offered[i] != nullptr; i++) {
        if (std::strcmp(ggml_backend_buft_name(offered[i]), name) != 0) {
            offered[n_kept++] = offered[i];
        }
    }
    offered[n_kept] = nullptr;
    return true;
}

bool PackedBuffers::can_hold(const ggml_tensor * weights) {
    return can_pack(weights);
}

ggml_backend_buffer_type_t PackedBuffers::stock_type(const ggml_tensor * weights) {
    for (size_t i = 0; installed != nullptr && offered[i] != nullptr; i++) {
        const ggml_backend_buffer_type_t type = offered[i];
        BufferType * own = reinterpret_cast<BufferType *>(type);
        if (own == installed || own->context == nullptr) {
            continue;
        }
        Buffer empty = {{}, type, nullptr, 0, GGML_BACKEND_BUFFER_USAGE_WEIGHTS};
        ggml_tensor placed = *weights, x = *weights, product = *weights;
        placed.buffer = reinterpret_cast<ggml_backend_buffer_t>(&empty);
        x.type = GGML_TYPE_F32;
        x.buffer = nullptr;
        product.op = GGML_OP_MUL_MAT;
        product.src[0] = &placed;
        product.src[1] = &x;
        if (static_cast<ExtraBufferType *>(own->context)->supports_op(own->device, &product)) {
            return type;
        }
    }
    return ggml_backend_cpu_buffer_type();
}

} // namespace pyfly
