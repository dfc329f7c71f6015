/* The loops of kernels.c for one instruction set: TARGET, with registers of WIDE float32 and FMA.
 * There is no include guard: kernels.c includes this once per instruction set, and NAME makes other
 * names each time. Elements are taken GROUP at a time, in PARTS registers; at the end of a row one
 * register at a time, of which the last holds only as many as are left.
 *
 * `type`, `parts` and `left` are constants wherever a loop is hot: everything is inlined, and the
 * compiler removes the branches on them. */

#define INLINE TARGET static inline __attribute__((always_inline))
#define PARTS (GROUP / WIDE)
#define floats NAME(floats_)
#define words NAME(words_)
#define halves NAME(halves_)
#define bytes NAME(bytes_)

typedef float floats __attribute__((vector_size(4 * WIDE)));
typedef uint32_t words __attribute__((vector_size(4 * WIDE)));
typedef uint16_t halves __attribute__((vector_size(2 * WIDE)));
typedef int8_t bytes __attribute__((vector_size(WIDE)));

/* `left` elements from i on, widened; zeros beyond. memcpy of a constant size is one load, and
 * allows addresses that are not aligned. A bfloat16 is the upper half of a float32. */
INLINE floats NAME(load)(int type, const void *values, ptrdiff_t i, size_t left) {
    if (type == BF16 || type == F16) {
        halves stored = {0};
        memcpy(&stored, (const uint16_t *)values + i, 2 * left);
        if (type == F16) return (floats)FLOATS_OF_F16(stored);
        return (floats)((words)WORDS_OF_HALVES(stored) << 16);
    }
    if (type == I8) {
        bytes stored = {0};
        memcpy(&stored, (const int8_t *)values + i, left);
        return (floats)FLOATS_OF_BYTES(stored);
    }
    floats stored = {0};
    memcpy(&stored, (const float *)values + i, 4 * left);
    return stored;
}

/* The bits of a bfloat16, rounded to the nearest, ties to even: adding 0x7fff carries into the upper
 * half if the lower half is above the middle, and the lowest kept bit makes a tie carry if it is odd.
 * A NaN could lose its mantissa that way and become infinite, so it is replaced by 0x7fc0. A
 * comparison of vectors gives all ones where it holds, which `odd` uses as a mask. */
INLINE words NAME(shorten)(floats value) {
    words bits = (words)value;
    words near = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words odd = (words)((bits & 0x7fffffff) > 0x7f800000);
    return (near & ~odd) | (odd & 0x7fc0);
}

/* To the type and back. There is no special case for NaN: it must come from bfloat16 values, whose
 * lower half is zero, so that nothing carries. */
INLINE floats NAME(rounded)(int type, floats value) {
    words bits = (words)value;
    if (type == BF16) return (floats)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000);
    return type == F16 ? (floats)FLOATS_OF_F16(F16_OF_FLOATS(value)) : value;
}

INLINE void NAME(store)(int type, void *values, ptrdiff_t i, floats value, size_t left) {
    if (type == F32) {
        memcpy((float *)values + i, &value, 4 * left);
        return;
    }
    halves stored = type == F16 ? (halves)F16_OF_FLOATS(value)
                                : (halves)HALVES_OF_WORDS(NAME(shorten)(value));
    memcpy((uint16_t *)values + i, &stored, 2 * left);
}

/* `value` in every lane: a scalar operand is broadcast, and value - 0 keeps even a negative zero. */
INLINE floats NAME(all)(float value) { return value - (floats){0}; }

INLINE double NAME(total)(floats lanes) {
    double sum = 0;
    for (int lane = 0; lane < WIDE; lane++) sum += lanes[lane];
    return sum;
}

/* `call` for all elements in [first, last): `parts` registers of `left` elements each, at i. Enums
 * rather than variables make `parts` and `left` constants. */
#define EACH(first, last, call)                                            \
    do {                                                                   \
        ptrdiff_t i = (first);                                             \
        const ptrdiff_t end = (last);                                      \
        for (; i + GROUP <= end; i += GROUP) {                             \
            enum { parts = PARTS, left = WIDE };                           \
            call;                                                          \
        }                                                                  \
        enum { parts = 1 };                                                \
        for (; i + WIDE <= end; i += WIDE) {                               \
            enum { left = WIDE };                                          \
            call;                                                          \
        }                                                                  \
        const size_t left = (size_t)(end - i);                             \
        if (left) call;                                                    \
    } while (0)

/* The same for `call` of the floating point type that `type` is. */
#define BY_TYPE(first, last, call)          \
    do {                                    \
        if (type == BF16)                   \
            EACH(first, last, call(BF16));  \
        else if (type == F16)               \
            EACH(first, last, call(F16));   \
        else                                \
            EACH(first, last, call(F32));   \
    } while (0)

/* out = (w_1 x_1 + ... + w_n x_n) / divisor, from left to right, rounded once. */
INLINE void NAME(weighted_sum_at)(int type, const void *const *terms, const float *weights,
                                  int count, float divisor, void *out, ptrdiff_t i, int parts,
                                  size_t left) {
    floats sum[PARTS];
    for (int p = 0; p < parts; p++)
        sum[p] = weights[0] * NAME(load)(type, terms[0], i + p * WIDE, left);
    for (int t = 1; t < count; t++)
        for (int p = 0; p < parts; p++) {
            floats value = NAME(load)(type, terms[t], i + p * WIDE, left);
            sum[p] = (floats)FMA(NAME(all)(weights[t]), value, sum[p]);
        }
    for (int p = 0; p < parts; p++)
        NAME(store)(type, out, i + p * WIDE, divisor == 1 ? sum[p] : sum[p] / divisor, left);
}

TARGET static void NAME(weighted_sum)(int type, const void *const *terms, const float *weights,
                                      int count, float divisor, void *out, ptrdiff_t size) {
#define CALL(type) NAME(weighted_sum_at)(type, terms, weights, count, divisor, out, i, parts, left)
    BY_TYPE(0, size, CALL);
#undef CALL
}

/* w (x - origin), both steps rounded to the type. */
INLINE floats NAME(difference)(int type, const void *values, ptrdiff_t i, size_t left,
                               floats origin, float weight) {
    floats delta = NAME(rounded)(type, NAME(load)(type, values, i, left) - origin);
    return NAME(rounded)(type, delta * weight);
}

/* out = base + scale * (sum of w_t (x_t - base)) / divisor. Every step is rounded to the type but
 * the sum over t, which is rounded once. */
INLINE void NAME(add_differences_at)(int type, const void *base, const void *const *models,
                                     const float *weights, int count, float divisor, float scale,
                                     void *out, ptrdiff_t i, int parts, size_t left) {
    floats origin[PARTS], sum[PARTS];
    for (int p = 0; p < parts; p++) {
        origin[p] = NAME(load)(type, base, i + p * WIDE, left);
        sum[p] = NAME(difference)(type, models[0], i + p * WIDE, left, origin[p], weights[0]);
    }
    for (int t = 1; t < count; t++)
        for (int p = 0; p < parts; p++)
            sum[p] += NAME(difference)(type, models[t], i + p * WIDE, left, origin[p], weights[t]);
    for (int p = 0; p < parts; p++) {
        floats merged = NAME(rounded)(type, sum[p]);
        if (divisor != 1) merged = NAME(rounded)(type, merged / divisor);
        if (scale != 1) merged = NAME(rounded)(type, merged * scale);
        NAME(store)(type, out, i + p * WIDE, origin[p] + merged, left);
    }
}

TARGET static void NAME(add_differences)(int type, const void *base, const void *const *models,
                                         const float *weights, int count, float divisor,
                                         float scale, void *out, ptrdiff_t size) {
#define CALL(type)                                                                             \
    NAME(add_differences_at)(type, base, models, weights, count, divisor, scale, out, i, parts, left)
    BY_TYPE(0, size, CALL);
#undef CALL
}

/* `call` for their type and for as many terms as there are, at most FEW; both are constant. */
#define FEW_OF(call, type, few, ...)                       \
    do {                                                   \
        if (few == 4)                                      \
            call(type, 4, __VA_ARGS__);                    \
        else if (few == 3)                                 \
            call(type, 3, __VA_ARGS__);                    \
        else if (few == 2)                                 \
            call(type, 2, __VA_ARGS__);                    \
        else                                               \
            call(type, 1, __VA_ARGS__);                    \
    } while (0)
#define TYPE_OF(call, type, few, ...)                      \
    do {                                                   \
        if (type == BF16)                                  \
            FEW_OF(call, BF16, few, __VA_ARGS__);          \
        else if (type == F16)                              \
            FEW_OF(call, F16, few, __VA_ARGS__);           \
        else if (type == I8)                               \
            FEW_OF(call, I8, few, __VA_ARGS__);            \
        else                                               \
            FEW_OF(call, F32, few, __VA_ARGS__);           \
    } while (0)

/* to = x - origin, in float32; `first` is where x and origin begin. */
INLINE void NAME(widen_at)(int type, const void *values, const void *origin, ptrdiff_t first,
                           float *to, ptrdiff_t i, int parts, size_t left) {
    for (int p = 0; p < parts; p++) {
        floats value = NAME(load)(type, values, first + i + p * WIDE, left);
        if (origin) value -= NAME(load)(type, origin, first + i + p * WIDE, left);
        NAME(store)(F32, to, i + p * WIDE, value, left);
    }
}

INLINE void NAME(dot_at)(const float *one, const float *other, floats *sum, ptrdiff_t i, int parts,
                         size_t left) {
    for (int p = 0; p < parts; p++)
        sum[p] += NAME(load)(F32, one, i + p * WIDE, left) *
                  NAME(load)(F32, other, i + p * WIDE, left);
}

/* <one, other> of at most SUMMED elements: lanes in float32, their sum in float64. */
INLINE double NAME(dot)(const float *one, const float *other, ptrdiff_t size) {
    floats sum[PARTS] = {{0}};
    EACH(0, size, NAME(dot_at)(one, other, sum, i, parts, left));
    double found = 0;
    for (int p = 0; p < PARTS; p++) found += NAME(total)(sum[p]);
    return found;
}

/* lanes[s, t] += (x_s - origin) (x_t - origin) for s <= t, of a few terms. Each pair has two
 * registers in turn, so that an FMA does not wait for the one before it. */
INLINE void NAME(products_at)(int type, int few, const void *origin, const void *const *terms,
                              floats *lanes, ptrdiff_t i, int parts, size_t left) {
    for (int p = 0; p < parts; p++) {
        floats value[FEW], from = {0};
        if (origin) from = NAME(load)(type, origin, i + p * WIDE, left);
        for (int t = 0; t < few; t++)
            value[t] = NAME(load)(type, terms[t], i + p * WIDE, left) - from;
        floats *sum = lanes + p % 2;
        for (int s = 0; s < few; s++)
            for (int t = s; t < few; t++, sum += 2) *sum = (floats)FMA(value[s], value[t], *sum);
    }
}

INLINE void NAME(products_few)(int type, int few, const void *origin, const void *const *terms,
                               ptrdiff_t first, ptrdiff_t last, double *sums) {
    floats lanes[FEW * (FEW + 1)] = {{0}};
    EACH(first, last, NAME(products_at)(type, few, origin, terms, lanes, i, parts, left));
    for (int pair = 0; pair < few * (few + 1) / 2; pair++)
        sums[pair] += NAME(total)(lanes[2 * pair]) + NAME(total)(lanes[2 * pair + 1]);
}

/* The same for any number of terms, which are widened to `room` first: SUMMED floats for each. */
INLINE void NAME(products_many)(int type, const void *origin, const void *const *terms, int count,
                                ptrdiff_t first, ptrdiff_t last, float *room, double *sums) {
    for (int t = 0; t < count; t++) {
#define CALL(type) \
    NAME(widen_at)(type, terms[t], origin, first, room + t * SUMMED, i, parts, left)
        BY_TYPE(0, last - first, CALL);
#undef CALL
    }
    for (int s = 0; s < count; s++)
        for (int t = s; t < count; t++)
            *sums++ += NAME(dot)(room + s * SUMMED, room + t * SUMMED, last - first);
}

/* sums[s, t] += <x_s - origin, x_t - origin> for s <= t, SUMMED elements of a row at a time. */
TARGET static void NAME(products)(int type, const void *origin, const void *const *terms,
                                  int count, ptrdiff_t rows, ptrdiff_t width, float *room,
                                  double *sums) {
    for (ptrdiff_t row = 0; row < rows; row++)
        for (ptrdiff_t begin = 0; begin < width; begin += SUMMED) {
            ptrdiff_t first = row * width + begin;
            ptrdiff_t last = first + (width - begin < SUMMED ? width - begin : SUMMED);
            if (count <= FEW)
                TYPE_OF(NAME(products_few), type, count, origin, terms, first, last, sums);
            else
                NAME(products_many)(type, origin, terms, count, first, last, room, sums);
        }
}

/* Prefetch what a later run of the loops below needs, one cache line of 64 bytes at a time. It may
 * lie beyond the end of a vector: prefetching an address never faults. */
INLINE void NAME(ask)(int type, const void *values, ptrdiff_t i, int parts) {
    for (int byte = 0; byte < parts * WIDE * SIZE_OF(type); byte += 64)
        __builtin_prefetch((const char *)values + i * SIZE_OF(type) + byte, 0, 2);
}

/* to = from + sum over a few vectors of weight * T, at the elements i of the vectors; `from` and
 * `to` begin with element `first`. The lines of `next` are asked for. */
INLINE void NAME(add_few_at)(int type, int few, const void *const *vectors,
                             const void *const *next, ptrdiff_t further, const float *weights,
                             const float *from, float *to, ptrdiff_t first, ptrdiff_t i, int parts,
                             size_t left) {
    floats sum[PARTS];
    for (int p = 0; p < parts; p++) sum[p] = NAME(load)(F32, from, i - first + p * WIDE, left);
    for (int v = 0; v < few; v++) {
        NAME(ask)(type, next[v], i + further, parts);
        for (int p = 0; p < parts; p++) {
            floats value = NAME(load)(type, vectors[v], i + p * WIDE, left);
            sum[p] = (floats)FMA(NAME(all)(weights[v]), value, sum[p]);
        }
    }
    for (int p = 0; p < parts; p++) NAME(store)(F32, to, i - first + p * WIDE, sum[p], left);
}

/* lanes[v] += T_v * gradient for a few vectors; each has PARTS registers of lanes. */
INLINE void NAME(dot_few_at)(int type, int few, const void *const *vectors,
                             const void *const *next, ptrdiff_t further, const float *gradient,
                             floats *lanes, ptrdiff_t i, int parts, size_t left) {
    for (int v = 0; v < few; v++) NAME(ask)(type, next[v], i + further, parts);
    for (int p = 0; p < parts; p++) {
        floats slope = NAME(load)(F32, gradient, i + p * WIDE, left);
        for (int v = 0; v < few; v++) {
            floats value = NAME(load)(type, vectors[v], i + p * WIDE, left);
            lanes[v * PARTS + p] = (floats)FMA(slope, value, lanes[v * PARTS + p]);
        }
    }
}

/* Elements [first, last), which lie in one row, of a few vectors. */
INLINE void NAME(add_few)(int type, int few, const struct pass *pass, const float *weights,
                          const float *from, float *to, ptrdiff_t first, ptrdiff_t last) {
    EACH(first, last,
         NAME(add_few_at)(type, few, pass->vectors, pass->next, pass->further, weights, from, to,
                          first, i, parts, left));
}

INLINE void NAME(dot_few)(int type, int few, const struct pass *pass, const float *gradient,
                          double *sums, const float *scales, ptrdiff_t first, ptrdiff_t last) {
    floats lanes[FEW * PARTS] = {{0}};
    EACH(first, last,
         NAME(dot_few_at)(type, few, pass->vectors, pass->next, pass->further, gradient, lanes, i,
                          parts, left));
    for (int v = 0; v < few; v++) {
        double found = 0;
        for (int p = 0; p < PARTS; p++) found += NAME(total)(lanes[v * PARTS + p]);
        sums[v] += scales ? found * scales[v] : found;
    }
}

/* Go through rows and columns a chunk at a time, and through all vectors a few at a time. In the
 * body `pass` says which vectors, and [first, last) is the part of `row` in the chunk. */
#define EACH_CHUNK(body)                                                                       \
    ptrdiff_t high = width < CHUNK ? CHUNK / width : 1, wide = width < CHUNK ? width : CHUNK;  \
    for (ptrdiff_t top = 0; top < rows; top += high)                                           \
        for (ptrdiff_t begin = 0; begin < width; begin += wide) {                              \
            ptrdiff_t bottom = top + high < rows ? top + high : rows;                          \
            ptrdiff_t end = begin + wide < width ? begin + wide : width;                       \
            for (int v = 0; v < count; v += FEW) {                                             \
                struct pass pass = pass_of(vectors, v, count, high * wide);                    \
                for (ptrdiff_t row = top; row < bottom; row++) {                               \
                    ptrdiff_t first = row * width + begin, last = row * width + end;           \
                    body                                                                       \
                }                                                                              \
            }                                                                                  \
        }

/* out = onto + sum over v of weights[row, v] * T_v[row], row by row. */
TARGET static void NAME(add_vectors)(int type, const void *const *vectors, const float *weights,
                                     int count, const float *onto, float *out, ptrdiff_t rows,
                                     ptrdiff_t width) {
    float sum[CHUNK];
    EACH_CHUNK({
        float *here = sum + (row - top) * wide;
        TYPE_OF(NAME(add_few), type, pass.few, &pass, weights + row * count + v,
                v == 0 ? onto + first : here, v + FEW >= count ? out + first : here, first, last);
    })
}

/* sums[v] += sum over rows of scales[row, v] * <T_v[row], gradient[row]>; no scales are ones. */
TARGET static void NAME(dot_vectors)(int type, const void *const *vectors, const float *scales,
                                     int count, const float *gradient, double *sums,
                                     ptrdiff_t rows, ptrdiff_t width) {
    EACH_CHUNK({
        const float *own = scales ? scales + row * count + v : NULL;
        TYPE_OF(NAME(dot_few), type, pass.few, &pass, gradient, sums + v, own, first, last);
    })
}

#undef EACH_CHUNK
#undef FEW_OF
#undef TYPE_OF
#undef INLINE
#undef PARTS
#undef EACH
#undef BY_TYPE
#undef floats
#undef words
#undef halves
#undef bytes
