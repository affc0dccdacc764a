/* pyfly.h: the C ABI of pyfly-cpp's core.
 *
 * Plain C; cffi reads the part between the two "cffi" marks as it stands. Conventions:
 *
 * - A function that can fail returns a pyfly_status and fills the caller's pyfly_error (never NULL) with one sentence.
 *   No C++ exception leaves. After PYFLY_OK the error is untouched.
 * - `const T *` with a length goes in; results go to the caller's buffers. No pointer is kept after return unless the
 *   comment says so.
 * - Handles are freed with their own _free; _free(NULL) does nothing. A handle belongs to one thread at a time.
 * - Tokens are int32_t ids in [0, n_vocab); positions are int32_t, 0 for the first token of a sequence; logits are
 *   float32 and natural-log units are nats; times are int64_t microseconds.
 */
#ifndef PYFLY_H
#define PYFLY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* cffi: begin */

typedef enum pyfly_status {
    PYFLY_OK = 0,
    PYFLY_STATUS_INVALID = 1,      /* the caller's mistake: an argument out of range, a token outside the vocabulary */
    PYFLY_STATUS_NO_MEMORY = 2,    /* allocation failed */
    PYFLY_STATUS_NATIVE = 3,       /* llama.cpp refused or failed */
    PYFLY_STATUS_NOT_FINITE = 4,   /* a logits row has no distribution: NaN, +inf, or -inf everywhere */
    PYFLY_STATUS_CONTEXT_FULL = 5, /* the next token does not fit in the context */
    PYFLY_STATUS_INCOMPATIBLE = 6, /* the draft's vocabulary is not the target's */
    PYFLY_STATUS_CALLBACK = 7,     /* a callback asked to stop; whoever set it knows why */
    PYFLY_STATUS_INTERNAL = 8      /* our own mistake */
} pyfly_status;

typedef struct pyfly_error {
    char message[1024]; /* UTF-8, zero-terminated. A word in braces is what the caller has words for: {draft_max} */
} pyfly_error;

/* Version of this ABI; the binding refuses another one. */
int32_t pyfly_abi_version(void);

/* The llama-cpp-python release this library was compiled against, such as "0.3.36". Static storage. */
const char * pyfly_llama_cpp_python_version(void);

/* The digest of the llama.cpp headers this library was compiled against (pyfly_cpp/_native/headers.py), 64 hexadecimal
 * digits; empty for the pure core. Static storage. */
const char * pyfly_llama_headers(void);

/* Instruction set of the row statistics on this machine: "avx512", "avx2" or "baseline". Static storage. */
const char * pyfly_simd_level(void);

/* Asked now and then, at most every 50 ms, by what takes long (measuring, evaluating again, drafters that catch up,
 * reading a prompt on a CPU), in the thread that called: another value than 0 ends it with PYFLY_STATUS_CALLBACK. For
 * the whole process; NULL: nobody is asked. */
typedef int32_t (*pyfly_stop_callback)(void);
void pyfly_set_stop(pyfly_stop_callback stop);

/* ---- Rows -------------------------------------------------------------------------------------------------------- */

/* Most tokens that are looked for in a row. */
#define PYFLY_MAX_TOP 32

/* ---- Gates and windows ------------------------------------------------------------------------------------------- */

typedef enum pyfly_gate_kind {
    PYFLY_GATE_EXACT = 0,              /* never defers */
    PYFLY_GATE_ENTROPY_TOP = 1,        /* defers when the top-n entropy >= threshold (nats, >= 0) */
    PYFLY_GATE_ENTROPY_NORMALIZED = 2, /* defers when entropy / ln n_vocab >= threshold (in [0, 1]); paper, Eq. 5-6 */
    PYFLY_GATE_MARGIN = 3,             /* defers when ln p(top 1) - ln p(draft) < threshold (nats, >= 0) */
    PYFLY_GATE_ALL = 4,                /* defers when its `n` operands all do */
    PYFLY_GATE_ANY = 5,                /* defers when one of its `n` operands does */
    PYFLY_GATE_TYPICAL = 6,     /* defers when p(draft) > min(threshold, second * exp(-entropy)); both in [0, 1] */
    PYFLY_GATE_RELAXED = 7,     /* defers one of the n most probable, with p(top 1) - p(draft) <= threshold */
    PYFLY_GATE_EXACT_FIRST = 8, /* defers nothing among the first n >= 0 tokens of an answer, all behind them */
    /* Fuzzy speculative decoding (Holsman et al. 2025, arXiv 2502.20704): defers when a divergence of the target's row
     * p and the draft's row q is <= threshold (nats, >= 0); with n > 0 over the target's n most probable tokens and all
     * others as one. m = (p + q) / 2. */
    PYFLY_GATE_FUZZY_KL = 10,        /* KL(q || p) */
    PYFLY_GATE_FUZZY_KL_TARGET = 11, /* KL(p || q) */
    PYFLY_GATE_FUZZY_JS = 12,        /* KL(p || m) / 2 + KL(q || m) / 2, at most ln 2 */
    PYFLY_GATE_FUZZY_JS_CODE = 13,   /* KL(m || p) / 2 + KL(m || q) / 2: what the reference code calls "js" */
    PYFLY_GATE_FUZZY_TV = 14,        /* sum |p - q| / 2, at most 1 */
    /* Never defers, but drafts and the target's choices are drawn by speculative sampling (csrc/speculative.h): a
     * choice is the drafted token as often as it can be. The window's size must be 0. Where the choice is the argmax,
     * so it stays. */
    PYFLY_GATE_STOCHASTIC = 15,
    PYFLY_GATE_NO_REPEAT = 18 /* defers unless the draft and the n - 1 tokens before it stand in the answer already */
} pyfly_gate_kind;

/* One node of a gate; a gate is an array of them in reverse Polish order, operands before their ALL or ANY. */
typedef struct pyfly_gate_node {
    int32_t kind;     /* pyfly_gate_kind */
    int32_t n;        /* ENTROPY_TOP, RELAXED: 1..PYFLY_MAX_TOP; EXACT_FIRST, FUZZY: >= 0; NO_REPEAT: >= 1;
                         ALL, ANY: operands, >= 1; else 0 */
    double threshold; /* see the kinds; 0 where they have none */
    double second;
} pyfly_gate_node;

typedef enum pyfly_window_rule {
    PYFLY_WINDOW_AGREE = 0,     /* the next `size` positions, all of the same step, match (FLy paper, Eq. 8-9) */
    PYFLY_WINDOW_RECONVERGE = 1 /* one drafted position among the next `size` matches; a step without a draft rejects
                                 * what is undecided before it */
} pyfly_window_rule;

typedef struct pyfly_window_config {
    int32_t size;         /* W >= 0; 0 lets every deferred mismatch stand at once */
    int32_t rule;         /* pyfly_window_rule */
    int32_t tail;         /* the last `tail` positions of a step are strict; -1: the rule's default */
    int32_t across_steps; /* 1: an undecided mismatch survives its step as provisional; 0, as under AGREE always: it
                              is rejected */
} pyfly_window_config;

/* ---- Verification of one step, without a model ------------------------------------------------------------------ */

/* How one drafted position was judged. */
typedef enum pyfly_reason {
    PYFLY_REASON_MATCH = 0,    /* the draft is the target's choice */
    PYFLY_REASON_LOOSE = 1,    /* a mismatch that passed safety, gate and window */
    PYFLY_REASON_GATE = 2,     /* rejected by the gate */
    PYFLY_REASON_WINDOW = 3,   /* rejected by its window: the positions after it broke it */
    PYFLY_REASON_BOUNDARY = 4, /* rejected because its window does not fit before the end of the step */
    PYFLY_REASON_SAFETY = 5    /* rejected because a protected, forbidden or untakeable token or text is involved, or
                                  because the gate would take one that is as good as impossible: margin >= 22.18 */
} pyfly_reason;

typedef struct pyfly_decision {
    int32_t reason; /* pyfly_reason; accepted when MATCH or LOOSE */
    int32_t choice; /* the target's choice at this position */
    double entropy; /* of the target's row, nats; the gate's own measure: top-n if an ENTROPY_TOP gate asked for it */
    double margin;  /* ln p(top 1) - ln p(draft), nats, >= 0; +inf for a forbidden draft token */
} pyfly_decision;

/* Judges one step. Every position is judged on its own, also behind the first rejection; the prefix rule then says
 * what is emitted: the accepted drafts up to the first rejection and the target's choice there, or all drafts and the
 * bonus token; nothing behind a token that ends a text.
 *
 * logits[n_draft + 1][n_vocab]; draft[n_draft]; draft_logits[n_draft][n_vocab], or NULL where no gate needs them;
 * target_tokens[n_draft + 1] or NULL for the argmax of each row; protected_tokens[n_protected] and eog_tokens[n_eog],
 * which end a text, are never accepted loosely; a window that is open where the text ends does not hold. What came
 * before in the answer: n_answered >= 0 tokens, answered[n_answered] or NULL where no gate needs them. Out:
 * decisions[n_draft], tokens[n_draft + 1], *n_tokens. window->across_steps must be 0: one step is all there is here.
 *
 * With a STOCHASTIC gate the choices are drawn, with the numbers that follow `seed`, so target_tokens must be NULL. p =
 * softmax(logits) then stands for the target's distribution after all that forbids, truncates and scales, and q =
 * softmax(draft_logits) is what each draft token was drawn from; without draft_logits nobody drew them. */
pyfly_status pyfly_verify(const float * logits, size_t n_vocab, const int32_t * draft, size_t n_draft,
                          const float * draft_logits, const int32_t * target_tokens, const pyfly_gate_node * gate,
                          size_t n_gate, const pyfly_window_config * window, const int32_t * protected_tokens,
                          size_t n_protected, const int32_t * eog_tokens, size_t n_eog, const int32_t * answered,
                          int64_t n_answered, uint64_t seed, pyfly_decision * decisions, int32_t * tokens,
                          size_t * n_tokens, pyfly_error * error);

/* ---- Targets ----------------------------------------------------------------------------------------------------- */

/* What requests are verified with: it turns a token sequence into logits rows and can forget its last positions. */
typedef struct pyfly_target pyfly_target;

/* Which of a context's thread counts change with the load of the machine: those are then the most it takes. */
typedef enum pyfly_adaptive_threads {
    PYFLY_THREADS_FIXED = 0,
    PYFLY_THREADS_ADAPT_SINGLE = 1, /* of evaluations of one token */
    PYFLY_THREADS_ADAPT_ALL = 2
} pyfly_adaptive_threads;

/* What a context calls while it evaluates, so that the inputs of its layers can be read where llama.cpp does not
 * publish them: as cb_eval (a ggml_backend_sched_eval_callback) and cb_eval_user_data of the llama_context_params of
 * one context, which it must outlive. */
typedef struct pyfly_layer_tap pyfly_layer_tap;
pyfly_layer_tap * pyfly_layer_tap_new(void);
void pyfly_layer_tap_free(pyfly_layer_tap * tap);
void * pyfly_layer_tap_callback(void);
void * pyfly_layer_tap_user(pyfly_layer_tap * tap);

/* A llama_context, given as a pointer; borrowed, must outlive the target. Uses its first n_requests sequences, one for
 * each slot of a batch; 0: all of its n_seq_max. `adaptive_threads`: a pyfly_adaptive_threads. n_ctx: most positions of
 * one request, where the context's sequences share its cells; 0: what the context allows. tap: of the context,
 * borrowed; or NULL. */
pyfly_status pyfly_target_llama_new(void * llama_context, int32_t adaptive_threads, int32_t n_requests, int32_t n_ctx,
                                    pyfly_layer_tap * tap, pyfly_target ** out, pyfly_error * error);

/* What a head learns of a target for tokens[n], 1 <= n <= the positions of a request: the inputs of n_layers layers,
 * side by side, and the k most probable next tokens (1 <= k <= PYFLY_MAX_TOP) by falling probability, with their log
 * probabilities in nats. The target's first sequence holds nothing afterwards. states: [n][n_layers][n_embd] as IEEE
 * half floats, values outside their range at its ends; final: [n][n_embd] likewise, the states behind the last norm,
 * which the output matrix reads; ids, log_probs: [n][k]. PYFLY_STATUS_NOT_FINITE for a state or a row with a NaN;
 * PYFLY_STATUS_INCOMPATIBLE for layers that cannot be read. */
pyfly_status pyfly_target_states(pyfly_target * target, const int32_t * layers, size_t n_layers, const int32_t * tokens,
                                 size_t n, int32_t k, uint16_t * states, uint16_t * final, int32_t * ids,
                                 float * log_probs, pyfly_error * error);

/* How a target's threads stand. */
typedef struct pyfly_threads {
    int32_t n;         /* of the next evaluation, where they adapt; else 0 */
    int32_t n_max;     /* on a free machine; else 0 */
    int64_t n_changes; /* of the count, for good */
    int64_t n_trials;  /* of another count, for a few evaluations */
} pyfly_threads;
void pyfly_target_threads(const pyfly_target * target, pyfly_threads * out);

/* A scripted target for tests, whose protected tokens are control tokens: `row` writes the logits that follow
 * history[n_history] to out[n_vocab] and returns 0, or another value to stop (PYFLY_STATUS_CALLBACK). `user` is handed
 * through. */
typedef int32_t (*pyfly_row_callback)(void * user, const int32_t * history, size_t n_history, float * out);
typedef struct pyfly_scripted_config {
    int32_t n_vocab; /* all sizes >= 1 */
    int32_t n_ctx;   /* positions of one sequence */
    int32_t n_batch; /* most tokens in one evaluation */
    int32_t n_sequences;
    int64_t n_cells;         /* positions of all sequences together */
    int32_t n_snapshots;     /* -1: a plain cache; else a recurrent memory, which can go back to the last n_snapshots
                                tokens of its last batch, to checkpoints and to the beginning */
    int32_t has_checkpoints; /* 0 or 1 */
    const char * const * pieces; /* [n_vocab] texts of the tokens, UTF-8 in pieces, copied; NULL: they have none */
} pyfly_scripted_config;
pyfly_status pyfly_target_scripted_new(const pyfly_scripted_config * config, pyfly_row_callback row, void * user,
                                       pyfly_target ** out, pyfly_error * error);

void pyfly_target_free(pyfly_target * target);

/* Marks tokens: `protected_tokens` are never accepted loosely, `eog_tokens` end a text. A llama target starts with its
 * vocabulary's control, unknown, unused and end-of-generation tokens and the markers of its chat template. */
pyfly_status pyfly_target_protect(pyfly_target * target, const int32_t * protected_tokens, size_t n_protected,
                                  const int32_t * eog_tokens, size_t n_eog, pyfly_error * error);

/* Texts (zero-terminated bytes, not empty, copied) that ordinary tokens write and that mean something to the chat, such
 * as "[INST]": where a drafted token or the target's choice begins or continues one, nothing is accepted loosely.
 * Replaces those of before. */
pyfly_status pyfly_target_protect_texts(pyfly_target * target, const char * const * texts, size_t n_texts,
                                        pyfly_error * error);

/* All protected tokens, rising. Returns how many there are; writes at most `capacity` of them. */
size_t pyfly_target_protected(const pyfly_target * target, int32_t * out, size_t capacity);

/* Tells the vocabulary of a target from others: a hash of what the tokenizer is and of the texts of all tokens. A
 * scripted target has 0. */
uint64_t pyfly_target_vocabulary(const pyfly_target * target);

/* Requests that the target can hold at once. */
int32_t pyfly_target_n_sequences(const pyfly_target * target);

/* Whether positions can be taken back, which speculation needs: 0 only for a recurrent memory without snapshots whose
 * state llama.cpp refused to copy. */
int32_t pyfly_target_can_rewind(const pyfly_target * target);

/* With is_on 1, until it is called with 0: an assertion of llama.cpp or ggml that fails on this thread, in a call that
 * loads a model or makes a context, makes that call return null instead of ending the process. Drafters do so by
 * themselves. */
void pyfly_load_guard(int32_t is_on);

/* From now on llama.cpp's log is not printed, in the whole process; the last ten lines of errors are kept. */
void pyfly_log_keep(void);

/* Writes the kept lines of errors to `out`, oldest first, with a newline after each, and forgets them. At most `size`
 * bytes are written, the closing 0 included. */
void pyfly_log_take_errors(char * out, size_t size);

/* What the header of a GGUF file says about decoding with it. */
typedef struct pyfly_model_info {
    char architecture[64]; /* "general.architecture", zero-terminated */
    int64_t n_ctx_train;   /* positions it was trained on; 0: the header does not say */
    int64_t n_positions;   /* positions that it can be given, where their embeddings are learned; 0: any */
    int64_t n_ctx_short;   /* of two RoPE scalings (LongRoPE), contexts of more positions get the long one; 0: there is
                              one scaling */
    int32_t n_nextn;       /* appended NextN (MTP) blocks */
    int32_t mtp_draft_max; /* most tokens their head drafts in a row, INT32_MAX for any number; 0: llama.cpp cannot run
                              it */
    int32_t n_layer;       /* layers, those of the head left out */
    int32_t layer_inputs;  /* 0: heads cannot read the inputs of its layers; 1: they can; 2: with a pyfly_layer_tap */
    uint64_t query_types; /* ggml types of the matrices whose products are queries, bit t for type t, and bit 63 for one
                             whose shape none of our kernels take; 0: the file does not hold them */
} pyfly_model_info;

/* Reads the header of the GGUF file at `path` (UTF-8). PYFLY_STATUS_INVALID if it is none, or if loading it as a target
 * would end the process: the message says what is wrong with it. With wants_mtp 1 also if its MTP head is incomplete,
 * and PYFLY_STATUS_INCOMPATIBLE if it has none that llama.cpp can run. */
pyfly_status pyfly_model_inspect(const char * path, int32_t wants_mtp, pyfly_model_info * out, pyfly_error * error);

/* How the GGUF file at `path` (UTF-8) could draft for `target`, a llama_model that may be loaded without its weights:
 * `out` receives the word of the drafter, zero-terminated: "draft", "mtp", "eagle3", "dflash" or "dspark". Reads no
 * weights. If it could not, fails as the constructor of that drafter would. Whether a head was trained for this very
 * model no file says. */
pyfly_status pyfly_companion_word(const void * target, const char * path, char out[16], pyfly_error * error);

/* What a llama_context, given as a pointer, takes besides the model's weights: caches, states and the buffers of the
 * computation. Of a context whose model was loaded with no_alloc: what it would take. In bytes. */
typedef struct pyfly_memory {
    int64_t host;   /* of this computer's memory */
    int64_t device; /* of the memory of other devices */
} pyfly_memory;
pyfly_status pyfly_context_memory(const void * llama_context, pyfly_memory * out, pyfly_error * error);

/* ---- Kernels ----------------------------------------------------------------------------------------------------- */

/* Instruction set of the products of packed weights: "amx" (few rows are multiplied as with "avx512vnni" then),
 * "avx512vnni", "avxvnni" or "avx2" on x86-64, "i8mm" or "dotprod" on 64-bit ARM, or "none" where this machine has none
 * of them. At most the one that the environment variable PYFLY_ISA names. Static storage. */
const char * pyfly_kernels_isa(void);

/* Makes room for our kernels in llama.cpp's CPU backend, once for the process; nothing is computed by them yet.
 * PYFLY_STATUS_NATIVE with why that is impossible: no such instruction set, a build of llama.cpp that does not export
 * or lay out what they need, or a model was loaded before. */
pyfly_status pyfly_kernels_install(pyfly_error * error);

/* Installs them, and lets llama.cpp's CPU backend call them from now on, after a look at how it calls an operation; no
 * model gets them by that. PYFLY_STATUS_NATIVE likewise. A llama.cpp whose layout is not known may end the process. */
pyfly_status pyfly_kernels_enable(pyfly_error * error);

/* The version and the commit of the ggml that is loaded. Static storage. */
const char * pyfly_ggml_build(void);

/* Models that are loaded from now on are not offered llama.cpp's extra buffer type of this name, "AMX". Not while
 * another thread loads one. PYFLY_STATUS_NATIVE where the kernels are not installed. */
pyfly_status pyfly_kernels_leave_out(const char * buffer_type, pyfly_error * error);

/* Types that there are kernels for: of ggml type t the bit 1 << t. 0 where there is no instruction set for them. */
uint64_t pyfly_kernels_types(void);

/* What models get that are loaded: bit 1 << t packs weights of ggml type t, where the shape allows it. Attention to
 * caches in F16 is ours, too, where its queries are products of such weights; it needs contexts with flash attention.
 * Locked: packed weights are kept from being swapped out. A model keeps what it was loaded with. */
#define PYFLY_KERNELS_ATTENTION 0x8000000000000000
#define PYFLY_KERNELS_LOCKED 0x4000000000000000

/* For models that are loaded on this thread before pyfly_kernels_restore: this, and nothing else. At most n_threads
 * threads pack weights; 0: as many as there are processors. Nothing is packed without pyfly_kernels_enable. */
typedef struct pyfly_kernels_taking pyfly_kernels_taking;
pyfly_kernels_taking * pyfly_kernels_take(uint64_t what, int32_t n_threads);

/* On the same thread, in reverse order. Returns the bytes of packed weights that the system refused to lock. */
size_t pyfly_kernels_restore(pyfly_kernels_taking * taking);

/* The same for all other models of the process from now on, also those that somebody else loads. */
void pyfly_kernels_take_everywhere(uint64_t what);

/* What an operation by the CPU backend gave. */
typedef struct pyfly_kernels_trial {
    double error; /* largest difference from the right result, as a share of the sum of magnitudes: about 1e-3 where
                     activations are quantised, 1e-6 where not */
    double us;    /* the shortest of the times, microseconds */
} pyfly_kernels_trial;

/* Multiplies a matrix of a type, 512 x n_out, with n_rows >= 1 rows on n_threads >= 1 threads, n_repeats >= 1 times;
 * n_out is a multiple of 64. is_ours 1: by our kernels, which are enabled; 0: as llama.cpp does
 * without them. The right result is that of the dequantised weights. PYFLY_STATUS_INVALID for a type without kernels
 * or a number out of range. */
pyfly_status pyfly_kernels_try(int32_t type, int64_t n_out, int32_t n_rows, int32_t n_threads, int32_t n_repeats,
                               int32_t is_ours, pyfly_kernels_trial * out, pyfly_error * error);

/* The last n_rows of n_cells tokens attend to all before them, likewise: eight heads of 128, in two groups. */
pyfly_status pyfly_kernels_try_attention(int64_t n_cells, int32_t n_rows, int32_t n_threads, int32_t n_repeats,
                                         int32_t is_ours, pyfly_kernels_trial * out, pyfly_error * error);

/* The product of pyfly_kernels_try for 1 to 32 rows, compared with each row alone: bit n - 1 of *out is set if a batch
 * of n rows gives any of them another bit. n_threads and is_ours as there, and the same failures. */
pyfly_status pyfly_kernels_compare(int32_t type, int64_t n_out, int32_t n_threads, int32_t is_ours, uint32_t * out,
                                   pyfly_error * error);

/* The products of a context's graph. Those that are not ours llama.cpp computes its own way, so that a token's bits
 * depend on its batch; without any, they are the same alone and in a batch. Those of all layers are one line: the
 * operation, the name and the type of its first matrix (or the keys), the number of that type (ggml_type), how many
 * there are, and 1 if they are ours, else 0, with tabs between; no name if that matrix is computed. At most `size`
 * bytes, the closing 0 included, are written to `out`. Looks at the graph with the adapters that are set. The context
 * is idle, and keeps what it holds. PYFLY_STATUS_NATIVE where llama.cpp shows no graphs. */
pyfly_status pyfly_context_products(void * llama_context_pointer, char * out, size_t size, pyfly_error * error);

/* ---- Drafters ---------------------------------------------------------------------------------------------------- */

typedef struct pyfly_drafter pyfly_drafter;

typedef struct pyfly_draft_model_config {
    const char * model_path; /* GGUF, UTF-8 */
    int32_t n_ctx;           /* context of the draft for each request, tokens; 0: they share as much as the target's */
    int32_t n_batch;         /* largest batch, tokens; 0: the target's */
    int32_t n_gpu_layers;    /* layers on the GPU; < 0: all */
    int32_t n_threads;       /* 0: the target's, also where they adapt */
    int32_t flash_attn;      /* 0: off; 1: on; -1: where the backend has it */
    int32_t offload_kqv;     /* 0 or 1 */
    int32_t use_extra_bufts; /* 1: the CPU may repack weights, for AMX and others; 0: it may not */
    uint64_t kernel_types;   /* what our kernels do for it, see pyfly_kernels_take */
    int32_t type_k;          /* ggml_type of the K cache; < 0: llama.cpp's default */
    int32_t type_v;          /* ggml_type of the V cache; < 0: llama.cpp's default */
    double p_min;            /* stop drafting when the draft's top probability falls under this, [0, 1] */
    void ** devices;         /* ggml_backend_dev_t, NULL behind the last; NULL: a draft model's are those that llama.cpp
                                chooses on this machine, a head's are its target's */
} pyfly_draft_model_config;

/* Loads a draft model beside the llama target `target` (borrowed, must outlive the drafter). PYFLY_STATUS_INCOMPATIBLE
 * when the vocabularies differ: the message names the first difference. */
pyfly_status pyfly_drafter_model_new(pyfly_target * target, const pyfly_draft_model_config * config,
                                     pyfly_drafter ** out, pyfly_error * error);

/* Multi-token prediction with the NextN blocks of the target's own file (config->model_path NULL, `is_loaded` 1: the
 * model was loaded with load_mtp) or of a companion file. At most draft_max tokens will be asked for: chained blocks
 * draft one each. Fails as pyfly_drafter_model_new does; PYFLY_STATUS_INCOMPATIBLE also where there is no head, or one
 * of another model. */
pyfly_status pyfly_drafter_mtp_new(pyfly_target * target, const pyfly_draft_model_config * config, int32_t draft_max,
                                   int32_t is_loaded, pyfly_drafter ** out, pyfly_error * error);

/* An EAGLE-3 head in a file of its own. Otherwise as pyfly_drafter_mtp_new. */
pyfly_status pyfly_drafter_eagle3_new(pyfly_target * target, const pyfly_draft_model_config * config,
                                      pyfly_drafter ** out, pyfly_error * error);

/* Heads in files of their own that draft a block of tokens in one pass, at most draft_max of them; 0: as many as a
 * block has. p_min is compared with the probability of a token, of DSpark with what its confidence head says. Otherwise
 * as pyfly_drafter_mtp_new. */
pyfly_status pyfly_drafter_dflash_new(pyfly_target * target, const pyfly_draft_model_config * config, int32_t draft_max,
                                      pyfly_drafter ** out, pyfly_error * error);
pyfly_status pyfly_drafter_dspark_new(pyfly_target * target, const pyfly_draft_model_config * config, int32_t draft_max,
                                      pyfly_drafter ** out, pyfly_error * error);

typedef enum pyfly_lookup_match {
    PYFLY_LOOKUP_LATEST = 0,  /* of the 256 latest ones the longest, however many tokens agree (64 at most), overlaps
                                 allowed */
    PYFLY_LOOKUP_EARLIEST = 1 /* the first occurrence that ends before the pattern begins (FLy reference) */
} pyfly_lookup_match;

#define PYFLY_MAX_LOOKUP 134217728 /* tokens of other texts that prompt lookup looks in */

/* Prompt lookup: proposes what followed the last n tokens where they occurred before. */
typedef struct pyfly_lookup_config {
    int32_t max_ngram, min_ngram; /* n = max_ngram..min_ngram, 1 <= min_ngram <= max_ngram <= 64 */
    int32_t num_pred;             /* most tokens of a proposal, >= 1 */
    int32_t match;                /* a pyfly_lookup_match: in the text itself; elsewhere it is always the latest */
    size_t n_memory;              /* most tokens of answers that are remembered; 0: none */
} pyfly_lookup_config;

/* Prompt lookup: searches the text itself, the answers of requests that have ended, and texts[n_texts].
 * answers[n_answers]: the first contents of the memory of answers. Both are copied, with a -1 between two texts.
 * `target` is borrowed; NULL: no token is known to be a control token. INVALID: a number is out of range, or a token is
 * none of the target's. */
pyfly_status pyfly_drafter_lookup_new(const pyfly_target * target, const pyfly_lookup_config * config,
                                      const int32_t * texts, size_t n_texts, const int32_t * answers, size_t n_answers,
                                      pyfly_drafter ** out, pyfly_error * error);

/* The answers of owner 0 that such a drafter remembers, the oldest first: at most `capacity` of their tokens to out,
 * and in *n_out how many there are. INVALID for other drafters. */
pyfly_status pyfly_drafter_lookup_answers(const pyfly_drafter * drafter, int32_t * out, size_t capacity, size_t * n_out,
                                          pyfly_error * error);

/* A draft model of another vocabulary: it goes by the text. INCOMPATIBLE where a vocabulary does not give back the text
 * that it is given. */
pyfly_status pyfly_drafter_cross_new(pyfly_target * target, const pyfly_draft_model_config * config,
                                     pyfly_drafter ** out, pyfly_error * error);

/* history[n_history] as the draft model of such a drafter sees it: at most `capacity` of its tokens to out, and in
 * *n_out how many there are. A character at the end that is not whole is left out. INVALID for other drafters. */
pyfly_status pyfly_drafter_translate(pyfly_drafter * drafter, const int32_t * history, size_t n_history, int32_t * out,
                                     size_t capacity, size_t * n_out, pyfly_error * error);

/* A drafter written by the caller: `draft` sees history[n_history] and writes up to `capacity` tokens to `out`, and
 * where `rows` is not NULL the logits [capacity][n_vocab] of which they are the argmax. It returns how many tokens, or
 * a negative number -n to stop (PYFLY_STATUS_CALLBACK; the message ends with "(n)"). n_vocab: the target's, 0: it never
 * has rows. */
typedef int32_t (*pyfly_draft_callback)(void * user, const int32_t * history, size_t n_history, int32_t * out,
                                        float * rows, size_t capacity);
pyfly_status pyfly_drafter_callback_new(pyfly_draft_callback draft, void * user, int32_t n_vocab, pyfly_drafter ** out,
                                        pyfly_error * error);

/* A drafter that the caller gives the rows of: `row` is as of pyfly_target_scripted_new, n_vocab the target's. Its
 * tokens are drawn from them where the gate wants that, else they are their argmax. */
pyfly_status pyfly_drafter_rows_new(pyfly_row_callback row, void * user, int32_t n_vocab, pyfly_drafter ** out,
                                    pyfly_error * error);

void pyfly_drafter_free(pyfly_drafter * drafter);

/* One proposal for history[n_history], at most n_max tokens to out[n_max]; *n_out receives how many. */
pyfly_status pyfly_drafter_propose(pyfly_drafter * drafter, const int32_t * history, size_t n_history, int32_t n_max,
                                   int32_t * out, int32_t * n_out, pyfly_error * error);

/* Tokens the drafter has evaluated on a model of its own so far. */
int64_t pyfly_drafter_n_evaluated(const pyfly_drafter * drafter);

/* ---- Batch ------------------------------------------------------------------------------------------------------- */

/* Several requests on one target: prefill, steps, rollback and counters. A request runs in a slot, 0 <= slot <
 * pyfly_target_n_sequences; what is left there when it has ended serves the next request that begins alike. */
typedef struct pyfly_batch pyfly_batch;

/* How a committed token came. */
typedef enum pyfly_origin {
    PYFLY_ORIGIN_MATCHED = 0, /* drafted, and the target's choice */
    PYFLY_ORIGIN_LOOSE = 1,   /* drafted, another than the target's choice, loosely accepted */
    PYFLY_ORIGIN_TARGET = 2   /* the target's own: a bonus or the choice at a rejection */
} pyfly_origin;

/* One committed token. */
typedef struct pyfly_record {
    int32_t position;
    int32_t token;
    int32_t origin;  /* pyfly_origin */
    int32_t choice;  /* what the target chose at this row */
    int32_t depth;   /* 1-based place in its step's draft, 0 for the target's own */
    int32_t reason;  /* origin TARGET: the pyfly_reason that rejected the draft here, or -1 for a bonus */
    int32_t step;    /* number of the step that produced it, from 0 at begin */
    int32_t drafter; /* index of the drafter that proposed it, -1 for the target's own */
    int32_t rejected_begin, rejected_end; /* what was drafted or taken back here, a slice of pyfly_batch_rejected */
    double entropy; /* of the target's row, nats; NaN where not measured (only mismatches are, unless tracing) */
    double margin;  /* ln p(top 1) - ln p(drafted token), nats; NaN where not measured */
    double logprob; /* ln p(token), nats; NaN where not measured */
} pyfly_record;

/* Depths that are counted one by one; deeper drafts are counted at the last one. */
#define PYFLY_MAX_DEPTH 64

/* Most drafters of one batch. */
#define PYFLY_MAX_DRAFTERS 8

/* Counters of a slot since the last pyfly_batch_reset_stats. All times in microseconds. */
typedef struct pyfly_stats {
    int64_t steps;           /* target batches that were verified, less those that gave the caller nothing */
    int64_t drafted;         /* tokens proposed to the target */
    int64_t committed;       /* tokens given to the caller for good (see pyfly_batch_end) */
    int64_t matched;         /* of these: drafted and the target's choice */
    int64_t loose_accepted;  /* of these: loose accepts */
    int64_t beginnings;      /* first steps: of a request, and of what follows tokens that the caller put behind it */
    int64_t committed_first; /* committed tokens of first steps, whose batches are in us_prefill */
    int64_t rejected_gate;   /* mismatches rejected, by reason */
    int64_t rejected_window;
    int64_t rejected_boundary;
    int64_t rejected_safety;
    int64_t rollbacks;                       /* broken or undecidable windows that took tokens back */
    int64_t rolled_back;                     /* tokens taken back by them */
    int64_t window_fallbacks;                /* windows across steps rejected at the end of their step: the target's
                                                memory could not have come back to them later */
    int64_t prefilled;                       /* prompt tokens evaluated */
    int64_t replayed;                        /* tokens evaluated again: the memory had to go back further than it can */
    int64_t checkpoints;                     /* copies of a recurrent state, to come back to */
    int64_t drafted_at[PYFLY_MAX_DEPTH];     /* drafted tokens by depth, [0] the first of a step */
    int64_t accepted_at[PYFLY_MAX_DEPTH];    /* committed drafts (matched or loose) by depth */
    int64_t accepted_by[PYFLY_MAX_DRAFTERS]; /* committed drafts by drafter */
    int64_t accepted_from_answers;           /* right drafts that prompt lookup found in earlier answers */
    double sum_margin_loose;                 /* sum of the margins of loose accepts, nats */
    double sum_margin_rejected;              /* sum of the finite margins of rejected mismatches, nats */
    int64_t n_margin_rejected;               /* how many went into it */
    int64_t us_prefill;                      /* prompt batches, that of the first step included */
    int64_t us_catch_up;                     /* of these: drafters that evaluated the prompt */
    int64_t us_draft;                        /* drafting */
    int64_t us_verify;                       /* the target's batches */
    int64_t us_gate;                         /* rows, gates, windows, sampling, rollback */
} pyfly_stats;

typedef struct pyfly_batch_config {
    int32_t adaptive; /* 1: the governor chooses drafter and draft length; 0: the first drafter that proposes */
    int32_t n_chunk;  /* most prompt tokens in an iteration while other requests are in the middle of theirs, >= 1; 0:
                         n_batch */
    int64_t us_chunk; /* microseconds by which these may lengthen such an iteration, as measured: chunks are shorter
                         then, 8 tokens at least, or n_chunk; 0: no limit */
} pyfly_batch_config;

typedef struct pyfly_batch_drafter {
    pyfly_drafter * drafter; /* borrowed until it is replaced */
    int32_t draft_max;       /* K: most tokens it drafts in a step, 0..n_batch - 1 */
} pyfly_batch_drafter;

/* The target is borrowed and must outlive the batch. */
pyfly_status pyfly_batch_new(pyfly_target * target, pyfly_batch ** out, pyfly_error * error);
void pyfly_batch_free(pyfly_batch * batch);

/* Sets what requests draft with; not while one runs. n_drafters <= PYFLY_MAX_DRAFTERS, the cheapest first. An error
 * changes nothing. What the governor has learned is kept as long as the drafters stay the same. */
pyfly_status pyfly_batch_configure(pyfly_batch * batch, const pyfly_batch_config * config,
                                   const pyfly_batch_drafter * drafters, size_t n_drafters, pyfly_error * error);

/* ---- What batches and drafts cost, for the governor. Times in microseconds, > 0 and finite ---- */

/* One batch of the target. */
typedef struct pyfly_cost_rows {
    int32_t n; /* rows, >= 1 */
    double us;
} pyfly_cost_rows;

/* One draft. */
typedef struct pyfly_cost_draft {
    int32_t drafter;    /* index */
    int32_t n_requests; /* requests that were drafted for together, >= 1 */
    int32_t k;          /* tokens for each, >= 1 */
    double us;
} pyfly_cost_draft;

#define PYFLY_MAX_COST_ROWS 32
#define PYFLY_MAX_COST_DRAFTS 128

typedef struct pyfly_costs {
    size_t n_rows, n_drafts; /* how many of these there are */
    pyfly_cost_rows rows[PYFLY_MAX_COST_ROWS];
    pyfly_cost_draft drafts[PYFLY_MAX_COST_DRAFTS];
    double catch_up_us[PYFLY_MAX_DRAFTERS]; /* [drafter]: of evaluating a token it has missed; 0: not known */
    double change_us; /* >= 0: more, for a batch of the target whose size is not that of the one before */
} pyfly_costs;

/* Measures, on made-up tokens: batches of the target, and the drafts of the drafters that were configured, except free
 * ones and the caller's own. Takes as long as a few dozen tokens. Not while a request runs. What the slots hold is
 * dropped, also by an error; the counters stay as they are. Nothing is measured (n_rows 0) where the target cannot
 * rewind. */
pyfly_status pyfly_batch_measure(pyfly_batch * batch, pyfly_costs * out, pyfly_error * error);

/* What the governor expects from now on, until other drafters are configured; iterations correct it. Needs
 * pyfly_batch_configure before; INVALID for numbers out of range, and then nothing changes. */
pyfly_status pyfly_batch_expect(pyfly_batch * batch, const pyfly_costs * costs, pyfly_error * error);

/* The free slot that history[n_history] of this owner (pyfly_request_settings.owner) continues; else an empty one, else
 * the one that was used longest ago. What other slots hold of its beginning is shared where the target can do that. -1:
 * every slot is taken. */
int32_t pyfly_batch_find_slot(const pyfly_batch * batch, const int32_t * history, size_t n_history, int32_t owner);

/* Writes which tokens may follow tokens[n], the answer so far: bit t % 32 of bits[t / 32] for token t. `user` is handed
 * through. Another value than 0: it has failed, and every token is forbidden; whoever set it knows why. */
typedef int32_t (*pyfly_mask_callback)(void * user, const int32_t * tokens, size_t n, uint32_t * bits, size_t n_words);

/* Adds a sampler that forbids tokens to a llama_sampler chain, before its first one that truncates, scales or selects.
 * It is asked once for each row, in the thread that steps; copies of the chain ask the same `user`, each about its own
 * tokens. */
pyfly_status pyfly_chain_mask(void * llama_sampler_chain, int32_t n_vocab, pyfly_mask_callback mask, void * user,
                              pyfly_error * error);

/* How a request is decoded and what is kept of it, apart from gate and draft lengths. */
typedef struct pyfly_request_settings {
    pyfly_window_config window;
    int32_t trace;     /* 1: measure entropy, margin and logprob of every token */
    int32_t keep_rows; /* 1: keep the raw logits row behind every committed token until the next iteration */
    int32_t resumable; /* 1: pyfly_batch_resume may follow a step; costs a copy of the sampler for each token but the
                          last of a step */
    int32_t all_rows;  /* 1: every row of the prompt is kept for pyfly_batch_prompt_row, a chunk at a time */
    int32_t owner; /* whose it is: of others nothing is used, neither what was evaluated nor, in prompt lookup, their
                      answers */
    int32_t follows_answers; /* 1: prompt lookup may draft from the owner's earlier answers whatever the gate, so the
                                answer may depend on them; 0: only where drafts cannot change it */
} pyfly_request_settings;

typedef struct pyfly_request {
    const int32_t * history; /* copied */
    size_t n_history;        /* >= 1 */
    int64_t n_evaluated;     /* how many of its tokens the target's memory holds, < n_history: everything behind them is
                                forgotten; -1: as many as the batch knows of */
    void * sampler_chain;    /* a llama_sampler chain, copied; NULL: the argmax. Samplers in it that Python wrote must
                                live until the request ends or another begins in its slot */
    const pyfly_gate_node * gate; /* copied */
    size_t n_gate;
    const int32_t * draft_max; /* one for each drafter of the batch, 0: it is not asked; NULL: those of the batch */
    pyfly_request_settings settings;
} pyfly_request;

/* A request begins in a slot; one that runs there is forgotten. An error changes nothing, unless the target's memory
 * could not be cut. */
pyfly_status pyfly_batch_begin(pyfly_batch * batch, int32_t slot, const pyfly_request * request, pyfly_error * error);

/* The request goes on behind its first n_keep tokens with tokens[n] of the caller: n_keep - 1 is the position of a
 * token that its last step committed. What the step committed behind it is forgotten, and the sampler is as it was
 * just after that token: its random numbers, penalties and grammar go on from there, without the caller's tokens. Needs
 * `resumable`. An error changes nothing, but for pyfly_batch_begin's exception: INVALID for another n_keep or a token
 * outside the vocabulary, CONTEXT_FULL if the tokens do not fit. */
pyfly_status pyfly_batch_resume(pyfly_batch * batch, int32_t slot, size_t n_keep, const int32_t * tokens,
                                size_t n_tokens, pyfly_error * error);

/* At most n_room more tokens are wanted (>= 1; before the first call: no limit): no more than n_room - 1 are drafted in
 * a step, unless a window is open: it needs drafts to be decided, and then more than n_room tokens may come. What is
 * committed counts down from it. */
pyfly_status pyfly_batch_want(pyfly_batch * batch, int32_t slot, int32_t n_room, pyfly_error * error);

/* *n_left receives how many tokens the target or a drafter has to evaluate before the request's next step; 0: the next
 * iteration has it, unless other requests make it wait. INVALID where no request runs. */
pyfly_status pyfly_batch_n_left(const pyfly_batch * batch, int32_t slot, size_t * n_left, pyfly_error * error);

/* What an iteration did for a running request. */
typedef struct pyfly_progress {
    int32_t slot;
    int32_t status; /* pyfly_status. CONTEXT_FULL: its context has no room for another token. Not OK: the request has
                       stopped, only pyfly_batch_end may follow, and pyfly_batch_failure says why */
    int32_t
        is_waiting;   /* 1: the cache has no room for it beside older requests; it goes on when one of them has ended */
    int32_t is_step;  /* 1: it had a step, 0: a chunk of its prompt, or nothing */
    size_t n_records; /* tokens it committed; 0 is possible while it has a prompt or an open window */
} pyfly_progress;

/* One iteration: every running request goes on with a chunk of its prompt or with a step (draft, verify, commit),
 * evaluated together. progress[n_slots] receives what came of the *n_progress requests that ran, the oldest first. A
 * window that is open when the context is full is rejected. Fails only where no request runs. */
pyfly_status pyfly_batch_step(pyfly_batch * batch, pyfly_progress * progress, size_t * n_progress, pyfly_error * error);

/* Why a request stopped in the last iteration: its status, and the sentence to `error`. */
pyfly_status pyfly_batch_failure(const pyfly_batch * batch, int32_t slot, pyfly_error * error);

/* Raw logits row [n_vocab] that follows prompt token `position`, if the last iteration evaluated it for a request with
 * all_rows; else NULL. Valid until the next call on the batch. */
const float * pyfly_batch_prompt_row(const pyfly_batch * batch, int32_t slot, int32_t position);

/* The records that the last iteration committed of the request, and the rejected drafts they point to. Valid until the
 * next call. */
const pyfly_record * pyfly_batch_records(const pyfly_batch * batch, int32_t slot, size_t * n_records);
const int32_t * pyfly_batch_rejected(const pyfly_batch * batch, int32_t slot);

/* Raw logits row [n_vocab] behind record i of the last iteration; NULL unless keep_rows. Valid until the next. */
const float * pyfly_batch_record_row(const pyfly_batch * batch, int32_t slot, size_t i);

/* States that are kept of a slot with a recurrent memory, to come back to (csrc/checkpoints.h): how many, the shortest
 * first; 0 for other memories. tokens[n]: what the context holds; states behind others are forgotten. */
size_t pyfly_batch_n_kept(pyfly_batch * batch, int32_t slot, const int32_t * tokens, size_t n);

/* The i-th, i < pyfly_batch_n_kept: its bytes, borrowed until the batch is used again, and *n, the first positions of
 * the slot that it is the state behind. */
const uint8_t * pyfly_batch_kept(pyfly_batch * batch, int32_t slot, size_t i, int32_t * n, size_t * n_bytes);

/* Gives one back, copied, while no request runs: the state behind tokens[n], n >= 1. The context was restored, by the
 * caller, to what begins with these tokens. Nothing happens to other memories. */
pyfly_status pyfly_batch_restore_kept(pyfly_batch * batch, int32_t slot, const int32_t * tokens, size_t n,
                                      const uint8_t * state, size_t n_bytes, pyfly_error * error);

/* Every token of the request: committed, then provisional ones. While a callback of its sampler runs: the tokens before
 * the row that is being sampled. Valid until the next call. */
const int32_t * pyfly_batch_history(const pyfly_batch * batch, int32_t slot, size_t * n_history);

/* Positions of the slot that the target's memory holds. A recurrent target may hold fewer than were asked for at
 * pyfly_batch_begin. */
size_t pyfly_batch_n_evaluated(const pyfly_batch * batch, int32_t slot);

/* Makes the target's memory hold exactly the first n_keep positions, so that somebody else may look at it between two
 * iterations (to save its state, say); what it does not hold of them is evaluated, unless evaluating has just failed.
 * The next step evaluates again what it misses. */
pyfly_status pyfly_batch_park(pyfly_batch * batch, int32_t slot, size_t n_keep, pyfly_error * error);

/* Ends the request: provisional tokens are dropped and the target's memory holds the first n_keep positions. What it
 * does not hold of them is evaluated, unless the request ended because evaluating failed: then it holds fewer
 * (pyfly_batch_n_evaluated). The caller has taken the token behind these positions, and none after it: what the last
 * step committed there is not counted in pyfly_batch_stats any more. n_keep -1: what it holds of the committed tokens,
 * and nothing is evaluated; all of them count. */
pyfly_status pyfly_batch_end(pyfly_batch * batch, int32_t slot, int64_t n_keep, pyfly_error * error);

void pyfly_batch_stats(const pyfly_batch * batch, int32_t slot, pyfly_stats * out);
void pyfly_batch_reset_stats(pyfly_batch * batch, int32_t slot);

/* What the governor knows. */
typedef struct pyfly_governor_state {
    double target_us[PYFLY_MAX_DEPTH + 1];                   /* cost of a target batch of [i] + 1 rows; 0: unknown */
    double draft_us[PYFLY_MAX_DRAFTERS * PYFLY_MAX_DEPTH];   /* [drafter][i]: of i + 1 tokens; 0: unknown or free */
    double acceptance[PYFLY_MAX_DRAFTERS * PYFLY_MAX_DEPTH]; /* [drafter][depth]: over all requests */
    double catch_up_us[PYFLY_MAX_DRAFTERS]; /* [drafter]: of a token it has missed; 0: unknown or free */
    int64_t steps_at[PYFLY_MAX_DEPTH + 1];  /* how often a draft length of [i] was chosen */
} pyfly_governor_state;
void pyfly_batch_governor(const pyfly_batch * batch, pyfly_governor_state * out);

/* cffi: end */

#ifdef __cplusplus
}
#endif

#endif /* PYFLY_H */
