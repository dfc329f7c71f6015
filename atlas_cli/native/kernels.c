/* Sums over several models or task vectors in one pass, for numbers as they are stored.
 *
 * torch has no such loops: it first widens every operand to a float32 tensor of its own. Here a few
 * elements at a time are widened, combined and rounded in registers. The terms of a merge may be in
 * files, which are read block by block (terms.h).
 *
 * kernels.py calls these functions through ctypes. Each exists once for every instruction set named
 * below: kernels.h is included with other macros each time, which give its functions other names
 * and map FMA and conversions to instructions. `level` says which of them run.
 *
 * Arithmetic is float32. Nothing is contracted into a fused operation except where FMA is
 * written, so that merged models are the same bits on every processor.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

enum { F32, BF16, F16, I8 };
enum {
    GROUP = 64,    /* elements that are kept in registers at a time */
    SUMMED = 2048, /* products that are summed in float32: more would cost digits */
    CHUNK = 2048,  /* elements of all vectors that are combined before the next elements */
    FEW = 4,       /* vectors that are read side by side: more would evict each other from caches */
};

/* A few vectors that are read side by side, and those whose cache lines are prefetched meanwhile:
 * the next few, or after the last few the first ones again, `further` elements on. The processor
 * does not prefetch them itself: it follows fewer streams than there are vectors. */
struct pass {
    int few;
    const void *const *vectors;
    const void *next[FEW];
    ptrdiff_t further;
};

static inline struct pass pass_of(const void *const *vectors, int v, int count,
                                  ptrdiff_t chunk) {
    struct pass pass = {count - v < FEW ? count - v : FEW, vectors + v, {0}, 0};
    int next = v + FEW < count ? v + FEW : 0;
    pass.further = next ? 0 : chunk;
    for (int k = 0; k < FEW; k++) pass.next[k] = vectors[next + k < count ? next + k : next];
    return pass;
}

#define SIZE_OF(type) ((type) == F32 ? 4 : (type) == I8 ? 1 : 2) /* bytes of an element */
#include "terms.h"

static int level; /* the form in use: 4 or 3, see RUN */

#if defined(__x86_64__)
#include <immintrin.h>

/* AVX-512: registers of 16 floats. The casts between vector types change no bits. */
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")))
#define NAME(name) name##_v4
#define WIDE 16
#define FMA(a, b, c) _mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c))
#define WORDS_OF_HALVES(halves) _mm512_cvtepu16_epi32((__m256i)(halves))
#define HALVES_OF_WORDS(words) _mm512_cvtepi32_epi16((__m512i)(words))
#define FLOATS_OF_F16(halves) _mm512_cvtph_ps((__m256i)(halves))
#define F16_OF_FLOATS(floats) _mm512_cvtps_ph((__m512)(floats), _MM_FROUND_TO_NEAREST_INT)
#define FLOATS_OF_BYTES(bytes) _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)(bytes)))
#include "kernels.h"
#undef TARGET
#undef NAME
#undef WIDE
#undef FMA
#undef WORDS_OF_HALVES
#undef HALVES_OF_WORDS
#undef FLOATS_OF_F16
#undef F16_OF_FLOATS
#undef FLOATS_OF_BYTES

/* AVX2: registers of 8 floats. It has no narrowing store of words: packus saturates, which changes
 * nothing since the words are below 1 << 16. Eight bytes are no vector type, but a long long. */
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define NAME(name) name##_v3
#define WIDE 8
#define FMA(a, b, c) _mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c))
#define WORDS_OF_HALVES(halves) _mm256_cvtepu16_epi32((__m128i)(halves))
#define HALVES_OF_WORDS(words)                                              \
    _mm_packus_epi32(_mm256_castsi256_si128((__m256i)(words)),              \
                     _mm256_extracti128_si256((__m256i)(words), 1))
#define FLOATS_OF_F16(halves) _mm256_cvtph_ps((__m128i)(halves))
#define F16_OF_FLOATS(floats) _mm256_cvtps_ph((__m256)(floats), _MM_FROUND_TO_NEAREST_INT)
#define FLOATS_OF_BYTES(bytes) \
    _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_set_epi64x(0, (long long)(bytes))))
#include "kernels.h"

static int best_level(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c"))
        return 0;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
               ? 4
               : 3;
}
#define RUN(name, ...) (level == 4 ? name##_v4(__VA_ARGS__) : name##_v3(__VA_ARGS__))

#elif defined(__aarch64__)
#include <arm_neon.h>

/* NEON, which every such processor has: registers of 4 floats; vfmaq adds to its first argument. */
#define TARGET
#define NAME(name) name##_v3
#define WIDE 4
#define FMA(a, b, c) vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b))
#define WORDS_OF_HALVES(halves) vmovl_u16((uint16x4_t)(halves))
#define HALVES_OF_WORDS(words) vmovn_u32((uint32x4_t)(words))
#define FLOATS_OF_F16(halves) vcvt_f32_f16((float16x4_t)(halves))
#define F16_OF_FLOATS(floats) vcvt_f16_f32((float32x4_t)(floats))
#define FLOATS_OF_BYTES(bytes) \
    vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8((uint32_t)(bytes))))))
#include "kernels.h"

static int best_level(void) { return 3; }
#define RUN(name, ...) name##_v3(__VA_ARGS__)

#else
#error "no form for this processor; atlas does without"
#endif

/* The best form that this processor can run; 0 if it can run none. */
EXPORT int atlas_best_level(void) { return best_level(); }

/* Use the best form up to `most` from now on, and return it. */
EXPORT int atlas_take_level(int most) {
    int best = best_level();
    return level = best < most ? best : most;
}

/* Where terms are, as arguments: see struct places. */
#define PLACES                                                                          \
    const char *const *values, const char *const *paths, const int64_t *stamps,         \
        const int64_t *offsets

/* Run `call` on blocks of `some` elements of all terms at reader.at, with their result at `here`;
 * return whether all could be read. */
#define EACH_BLOCK(call)                                                                \
    do {                                                                                \
        struct reader reader;                                                           \
        int whole = open_terms(&reader, type, places, count, size);                     \
        if (!whole) return 0;                                                           \
        for (ptrdiff_t first = 0; whole && first < size; first += reader.block) {       \
            ptrdiff_t some = size - first < reader.block ? size - first : reader.block; \
            char *here = out + first * reader.size;                                     \
            if ((whole = read_terms(&reader, first, some))) call;                       \
        }                                                                               \
        close_terms(&reader);                                                           \
        return whole;                                                                   \
    } while (0)

/* The number by which these functions know a dtype, or -1 if they do not. */
EXPORT int atlas_type(const char *name) {
    static const char *const names[] = {"float32", "bfloat16", "float16", "int8"};
    for (int type = F32; type <= I8; type++)
        if (strcmp(name, names[type]) == 0) return type;
    return -1;
}

EXPORT int atlas_weighted_sum(int type, PLACES, const float *weights, int count, float divisor,
                              char *out, ptrdiff_t size) {
    struct places places = {values, paths, stamps, offsets};
    EACH_BLOCK(RUN(weighted_sum, type, reader.at, weights, count, divisor, here, some));
}

/* The first term is the base. */
EXPORT int atlas_add_differences(int type, PLACES, const float *weights, int count, float divisor,
                                 float scale, char *out, ptrdiff_t size) {
    struct places places = {values, paths, stamps, offsets};
    EACH_BLOCK(RUN(add_differences, type, reader.at[0], reader.at + 1, weights, count - 1, divisor,
                   scale, here, some));
}

/* `origins` is 1 if the first term is what the others are measured from, else 0. A block has whole
 * rows, or is a part of one that ends where a partial sum does: so the sums are the same however
 * long the blocks are. */
EXPORT int atlas_products(int type, PLACES, int count, int origins, ptrdiff_t rows,
                          ptrdiff_t width, double *sums) {
    struct places places = {values, paths, stamps, offsets};
    struct reader reader;
    int whole = open_terms(&reader, type, places, count, rows * width);
    if (!whole) return 0;
    float *room = NULL;
    if (count - origins > FEW) {
        room = malloc((size_t)(count - origins) * SUMMED * sizeof *room);
        whole = room != NULL;
    }
    ptrdiff_t high = width < reader.block ? reader.block / (width ? width : 1) : 1;
    ptrdiff_t wide = width < reader.block ? width : reader.block;
    for (ptrdiff_t row = 0; whole && row < rows; row += high) {
        ptrdiff_t some = rows - row < high ? rows - row : high;
        for (ptrdiff_t begin = 0; whole && begin < width; begin += wide) {
            ptrdiff_t part = width - begin < wide ? width - begin : wide;
            if ((whole = read_terms(&reader, row * width + begin, some * part)))
                RUN(products, type, origins ? reader.at[0] : NULL, reader.at + origins,
                    count - origins, some, part, room, sums);
        }
    }
    free(room);
    close_terms(&reader);
    return whole;
}

EXPORT void atlas_add_vectors(int type, const void *const *vectors, const float *weights, int count,
                              const float *onto, float *out, ptrdiff_t rows, ptrdiff_t width) {
    RUN(add_vectors, type, vectors, weights, count, onto, out, rows, width);
}

EXPORT void atlas_dot_vectors(int type, const void *const *vectors, const float *scales, int count,
                              const float *gradient, double *sums, ptrdiff_t rows,
                              ptrdiff_t width) {
    RUN(dot_vectors, type, vectors, scales, count, gradient, sums, rows, width);
}

/* Sort every row of magnitudes (15 bits: floats of 16 bits without a sign order as integers do).
 * A radix sort with two passes, by the low 8 and then by the high 7 bits; `low` and `high` count
 * the digits first and then hold where the next number with a digit goes. The rows of `out` are
 * `apart`; `room` has as many numbers as a row. */
EXPORT void atlas_sort_rows(const uint16_t *values, uint16_t *out, ptrdiff_t rows, ptrdiff_t width,
                            ptrdiff_t apart, uint16_t *room) {
    for (ptrdiff_t row = 0; row < rows; row++, values += width, out += apart) {
        ptrdiff_t low[256] = {0}, high[128] = {0};
        for (ptrdiff_t i = 0; i < width; i++) {
            low[values[i] & 255]++;
            high[(values[i] >> 8) & 127]++;
        }
        ptrdiff_t before = 0, earlier = 0;
        for (int digit = 0; digit < 256; digit++) {
            ptrdiff_t count = low[digit];
            low[digit] = before;
            before += count;
        }
        for (int digit = 0; digit < 128; digit++) {
            ptrdiff_t count = high[digit];
            high[digit] = earlier;
            earlier += count;
        }
        for (ptrdiff_t i = 0; i < width; i++) room[low[values[i] & 255]++] = values[i];
        for (ptrdiff_t i = 0; i < width; i++) out[high[(room[i] >> 8) & 127]++] = room[i];
    }
}

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", NULL, -1, NULL,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&module); }
