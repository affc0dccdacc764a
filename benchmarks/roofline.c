/* How fast this machine reads memory, and how fast it multiplies bytes: what kernels.py holds its times against.
 *
 *     cc -O2 -pthread roofline.c -o roofline && ./roofline THREADS [memory]
 *
 * Prints gigabytes a second, read by all threads from 256 MB that no cache holds; and 10^9 products of two bytes a
 * second by the dot instruction of each instruction set that this processor has, without anything to load; with
 * `memory`, the first alone. */
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { n_bytes = 256 << 20, n_turns = 5, n_loops = 20000000, most_threads = 256 };

static uint8_t * memory;
static int n_threads;

struct job {
    int number;
    uint64_t (*work)(int number);
    uint64_t result;
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
}

static void * run(void * p) {
    struct job * job = p;
    job->result = job->work(job->number);
    return NULL;
}

/* Seconds for all threads, the shortest of the turns. */
static double seconds(uint64_t (*work)(int number)) {
    double best = 1e30;
    for (int turn = 0; turn < n_turns; turn++) {
        pthread_t threads[most_threads];
        struct job jobs[most_threads];
        const double begin = now();
        for (int i = 0; i < n_threads; i++) {
            jobs[i] = (struct job){i, work, 0};
            pthread_create(&threads[i], NULL, run, &jobs[i]);
        }
        for (int i = 0; i < n_threads; i++) {
            pthread_join(threads[i], NULL);
        }
        const double took = now() - begin;
        best = took < best ? took : best;
    }
    return best;
}

__attribute__((target("avx2"))) static uint64_t read_memory(int number) {
    const size_t size = n_bytes / (size_t) n_threads / 128 * 128;
    const uint8_t * p = memory + (size_t) number * size;
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (size_t i = 0; i < size; i += 128) {
        _mm_prefetch((const char *) p + i + 1024, _MM_HINT_T0);
        _mm_prefetch((const char *) p + i + 1088, _MM_HINT_T0);
        a = _mm256_xor_si256(a, _mm256_loadu_si256((const __m256i *) (p + i)));
        b = _mm256_xor_si256(b, _mm256_loadu_si256((const __m256i *) (p + i + 32)));
        c = _mm256_xor_si256(c, _mm256_loadu_si256((const __m256i *) (p + i + 64)));
        d = _mm256_xor_si256(d, _mm256_loadu_si256((const __m256i *) (p + i + 96)));
    }
    return (uint64_t) _mm256_extract_epi64(_mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d)), 0);
}

/* Twelve sums, so that none waits for itself. `DOT` adds a product of x and y to sum; the compiler may not move it. */
#define LOOP(V, DOT)                                                                                                   \
    V s0 = {0}, s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0, s8 = s0, s9 = s0, s10 = s0, s11 = s0;   \
    V x = {(long long) number | 0x0101010101010101}, y = x, t;                                                         \
    for (long i = 0; i < n_loops; i++) {                                                                               \
        DOT(s0) DOT(s1) DOT(s2) DOT(s3) DOT(s4) DOT(s5) DOT(s6) DOT(s7) DOT(s8) DOT(s9) DOT(s10) DOT(s11)              \
    }                                                                                                                  \
    (void) t;                                                                                                          \
    return (uint64_t) (s0[0] + s1[0] + s2[0] + s3[0] + s4[0] + s5[0] + s6[0] + s7[0] + s8[0] + s9[0] + s10[0] + s11[0]);

#define MADDUBS(s) __asm__ volatile("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(s), "=&x"(t) : "x"(x), "x"(y));
#define DPBUSD_256(s) __asm__ volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(s) : "x"(x), "x"(y));
#define DPBUSD_512(s) __asm__ volatile("vpdpbusd %2, %1, %0" : "+v"(s) : "v"(x), "v"(y));

__attribute__((target("avx2"))) static uint64_t maddubs(int number) {
    LOOP(__m256i, MADDUBS)
}

__attribute__((target("avx2"))) static uint64_t dpbusd_256(int number) {
    LOOP(__m256i, DPBUSD_256)
}

__attribute__((target("avx512f"))) static uint64_t dpbusd_512(int number) {
    LOOP(__m512i, DPBUSD_512)
}

static void print_products(const char * name, uint64_t (*work)(int), double n_each) {
    printf("%s %.1f\n", name, 12.0 * n_loops * n_each * n_threads / seconds(work) / 1e9);
}

int main(int n, char ** arguments) {
    n_threads = n > 1 ? atoi(arguments[1]) : 1;
    if (n_threads < 1 || n_threads > most_threads || !__builtin_cpu_supports("avx2")) {
        fprintf(stderr, "roofline: give 1 to %d threads, on a processor with AVX2\n", most_threads);
        return 2;
    }
    memory = malloc((size_t) n_bytes + 4096);
    if (memory == NULL) {
        fprintf(stderr, "roofline: too little memory\n");
        return 1;
    }
    memset(memory, 1, (size_t) n_bytes + 4096);
    printf("memory %.2f\n", n_bytes / seconds(read_memory) / 1e9);
    if (n > 2 && strcmp(arguments[2], "memory") == 0) {
        return 0;
    }
    print_products("avx2", maddubs, 32);
    if (__builtin_cpu_supports("avxvnni")) {
        print_products("avxvnni", dpbusd_256, 32);
    }
    if (__builtin_cpu_supports("avx512vnni")) {
        print_products("avx512vnni", dpbusd_512, 64);
    }
    return 0;
}
