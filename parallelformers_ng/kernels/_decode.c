/* What a decode step does again and again, with one thread: linear layers for a few rows, root-mean-square norms,
 * attention (`_attention.h`), what layers are made of these (`_layer.h`), and one layer after another (`_stack.h`).
 *
 * Linear: y = x Wᵀ + b.
 * The product is bound by the speed at which W is read. W, `[out, in]` in rows `stride` numbers apart (a slice of a wider
 * matrix stays where it lies), is read once and in the order of memory, for rows side by side would be several streams,
 * which the processor's own prefetcher follows badly. For one row of x that prefetcher is best left alone, with two
 * exceptions: short rows of fp32 go faster where it is told of a page some pages ahead, for it stops at a page's end; and
 * an x that leaves the first-level cache no room, twice as large as a row of bf16, stays there if W goes past the
 * second-level cache, asked line by line. Several rows of x go over tiles of OUTS rows of W, the sums in registers and
 * the next tile asked into the second-level cache.
 *
 * Norm (Zhang & Sennrich 2019, arXiv:1910.07467): y = w ⊙ x / √(ε + ‖x‖² / n), in one call and two passes over a row
 * that stays in the first-level cache, where torch takes seven operators. A 16-bit row is rounded before it is scaled
 * by w, and after, as the modelling code of transformers does it.
 *
 * Sums are taken in fp32, in an order that depends on the sizes alone: equal inputs, equal bits on every rank.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "_attention.h"
#include "_vectors.h"

enum { OUTS = 4, ROWS = 4, CACHE_LINE_BYTES = 64, PAGE_BYTES = 4096, HEAD_LINES = 4, AHEAD_PAGES = 4, NARROW = 2048 };
enum { PASSING = 0, SECOND_LEVEL = 2 }; /* where a prefetch leads */

/* A tile is `outs` rows of W times `rows` rows of x, constants where it is inlined: as many sums as fit the registers,
 * so that each number that is loaded meets several others. Only the first tile of some rows of W has to wait for the
 * memory and asks for what comes `next`, where a cursor runs along the rows. `x` is fp32 whatever the type of W. */
#define DEFINE_LINEAR(NAME, TYPE, LOAD)                                                                       \
    INLINE void tile_##NAME(const float *x, const TYPE *w, const TYPE *bias, TYPE *y, size_t in,              \
                            size_t stride, size_t out, size_t outs, size_t rows, const TYPE *next,            \
                            size_t cursor)                                                                    \
    {                                                                                                         \
        const size_t step = CACHE_LINE_BYTES / sizeof(TYPE);                                                  \
        Floats sum[OUTS * ROWS] = {{0}}, a[OUTS], b;                                                          \
        size_t i = 0;                                                                                         \
        for (; i + LANES <= in; i += LANES) {                                                                 \
            if (next && i % step == 0)                                                                        \
                for (size_t o = 0; o < outs; o++) {                                                           \
                    __builtin_prefetch(next + cursor, 0, SECOND_LEVEL);                                       \
                    cursor += step;                                                                           \
                    if (cursor >= in) next += stride, cursor = 0;                                             \
                }                                                                                             \
            for (size_t o = 0; o < outs; o++) LOAD(a[o], w + o * stride + i);                                 \
            for (size_t r = 0; r < rows; r++) {                                                               \
                LOAD_F32(b, x + r * in + i);                                                                  \
                for (size_t o = 0; o < outs; o++) sum[o * ROWS + r] += a[o] * b;                              \
            }                                                                                                 \
        }                                                                                                     \
        for (size_t o = 0; o < outs; o++)                                                                     \
            for (size_t r = 0; r < rows; r++) {                                                               \
                float total = sum_lanes(&sum[o * ROWS + r]) + (bias ? load_##NAME(bias[o]) : 0.0f);           \
                for (size_t j = i; j < in; j++) total += load_##NAME(w[o * stride + j]) * x[r * in + j];      \
                y[r * out + o] = store_##NAME(total);                                                         \
            }                                                                                                 \
    }                                                                                                         \
    INLINE void tiles_##NAME(const float *x, const TYPE *w, const TYPE *bias, TYPE *y, size_t rows, size_t in,\
                             size_t stride, size_t out, size_t outs)                                          \
    {                                                                                                         \
        const TYPE *next = w + outs * stride;                                                                 \
        size_t r = 0;                                                                                         \
        for (; r + ROWS <= rows; r += ROWS, next = NULL)                                                      \
            tile_##NAME(x + r * in, w, bias, y + r * out, in, stride, out, outs, ROWS, next, 0);              \
        for (; r + 2 <= rows; r += 2, next = NULL)                                                            \
            tile_##NAME(x + r * in, w, bias, y + r * out, in, stride, out, outs, 2, next, 0);                 \
        if (r < rows) tile_##NAME(x + r * in, w, bias, y + r * out, in, stride, out, outs, 1, next, 0);       \
    }                                                                                                         \
    /* One row of W and one of x. Where W is `passing`, it is asked past the second-level cache, a page ahead. */     \
    INLINE float dot_##NAME(const float *x, const TYPE *w, size_t in, size_t stride, int passing)             \
    {                                                                                                         \
        const size_t page = PAGE_BYTES / sizeof(TYPE), line = CACHE_LINE_BYTES / sizeof(TYPE);                \
        Floats sum[2] = {{0}, {0}}, a, b;                                                                     \
        size_t i = 0;                                                                                         \
        for (; i + 2 * LANES <= in; i += 2 * LANES) {                                                         \
            for (size_t j = i; passing && j < i + 2 * LANES; j += line)                                       \
                __builtin_prefetch(w + j + page + (j + page < in ? 0 : stride - in), 0, PASSING);             \
            for (size_t j = 0; j < 2; j++) {                                                                  \
                LOAD(a, w + i + j * LANES);                                                                   \
                LOAD_F32(b, x + i + j * LANES);                                                               \
                sum[j] += a * b;                                                                              \
            }                                                                                                 \
        }                                                                                                     \
        sum[0] += sum[1];                                                                                     \
        float total = sum_lanes(&sum[0]);                                                                     \
        for (; i < in; i++) total += load_##NAME(w[i]) * x[i];                                                \
        return total;                                                                                         \
    }                                                                                                         \
    INLINE void dots_##NAME(const float *x, const TYPE *w, const TYPE *bias, TYPE *y, size_t in,              \
                            size_t stride, size_t out, int heads, int passing)                                \
    {                                                                                                         \
        const size_t page = PAGE_BYTES / sizeof(TYPE), line = CACHE_LINE_BYTES / sizeof(TYPE);                \
        const size_t ahead = AHEAD_PAGES * page / in * stride + AHEAD_PAGES * page % in;                      \
        for (size_t o = 0; o < out; o++, w += stride) {                                                       \
            for (size_t i = 0; heads && i < in; i += page)                                                    \
                for (size_t j = 0; j < HEAD_LINES; j++)                                                       \
                    __builtin_prefetch(w + ahead + i + j * line, 0, SECOND_LEVEL);                            \
            y[o] = store_##NAME(dot_##NAME(x, w, in, stride, passing) + (bias ? load_##NAME(bias[o]) : 0.0f));\
        }                                                                                                     \
    }                                                                                                         \
    CLONES static void linear_##NAME(const float *x, const TYPE *w, const TYPE *bias, TYPE *y, size_t rows,   \
                                     size_t in, size_t stride, size_t out)                                    \
    {                                                                                                         \
        if (rows == 1) {                                                                                      \
            if (in > NARROW) dots_##NAME(x, w, bias, y, in, stride, out, 0, sizeof(TYPE) < sizeof(float));    \
            else dots_##NAME(x, w, bias, y, in, stride, out, sizeof(TYPE) == sizeof(float), 0);               \
            return;                                                                                           \
        }                                                                                                     \
        size_t o = 0;                                                                                         \
        for (; o + OUTS <= out; o += OUTS)                                                                    \
            tiles_##NAME(x, w + o * stride, bias ? bias + o : bias, y + o, rows, in, stride, out, OUTS);      \
        for (; o < out; o++)                                                                                  \
            tiles_##NAME(x, w + o * stride, bias ? bias + o : bias, y + o, rows, in, stride, out, 1);         \
    }

DEFINE_LINEAR(f32, float, LOAD_F32)
DEFINE_LINEAR(bf16, uint16_t, LOAD_BF16)

#define DEFINE_RMS_NORM(NAME, TYPE, LOAD)                                                                     \
    CLONES static void rms_norm_##NAME(const TYPE *x, const TYPE *w, TYPE *y, size_t rows, size_t width,      \
                                       float epsilon)                                                         \
    {                                                                                                         \
        for (size_t r = 0; r < rows; r++, x += width, y += width) {                                           \
            Floats sum[2] = {{0}, {0}}, a;                                                                    \
            size_t i = 0;                                                                                     \
            for (; i + 2 * LANES <= width; i += 2 * LANES)                                                    \
                for (size_t j = 0; j < 2; j++) {                                                              \
                    LOAD(a, x + i + j * LANES);                                                               \
                    sum[j] += a * a;                                                                          \
                }                                                                                             \
            sum[0] += sum[1];                                                                                 \
            float total = sum_lanes(&sum[0]);                                                                 \
            for (; i < width; i++) total += load_##NAME(x[i]) * load_##NAME(x[i]);                            \
            float scale = 1.0f / sqrtf(total / (float)width + epsilon);                                       \
            for (i = 0; i < width; i++)                                                                       \
                y[i] = store_##NAME(load_##NAME(w[i]) * load_##NAME(store_##NAME(load_##NAME(x[i]) * scale)));\
        }                                                                                                     \
    }

DEFINE_RMS_NORM(f32, float, LOAD_F32)
DEFINE_RMS_NORM(bf16, uint16_t, LOAD_BF16)

#include "_layer.h" /* made of the above */
#include "_stack.h"

static int multiply(const size_t *v)
{
    size_t rows = v[4], in = v[5], stride = v[6], out = v[7];
    if (v[8] == F32) {
        linear_f32((const float *)v[0], (const float *)v[1], (const float *)v[2], (float *)v[3], rows, in, stride, out);
        return 0;
    }
    const uint16_t *x = (const uint16_t *)v[0];
    float *wide = malloc((rows * in + 1) * sizeof(float));
    if (!wide) return -1;
    for (size_t i = 0; i < rows * in; i++) wide[i] = load_bf16(x[i]);
    linear_bf16(wide, (const uint16_t *)v[1], (const uint16_t *)v[2], (uint16_t *)v[3], rows, in, stride, out);
    free(wide);
    return 0;
}

static int read_numbers(PyObject *const *args, Py_ssize_t count, size_t *values)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        values[i] = PyLong_AsSize_t(args[i]);
        if (values[i] == (size_t)-1 && PyErr_Occurred()) return -1;
    }
    return 0;
}

/* Numbers of which the last is a kind. */
static int read_sizes(const char *who, PyObject *const *args, Py_ssize_t count, size_t *values)
{
    if (read_numbers(args, count, values) < 0) return -1;
    if (values[count - 1] > BF16) {
        PyErr_Format(PyExc_ValueError, "%s: kind %zu out of range", who, values[count - 1]);
        return -1;
    }
    return 0;
}

/* Addresses are the caller's word; a `bias` of 0 is none. */
static PyObject *linear(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    size_t v[9];
    if (nargs != 9) return PyErr_Format(PyExc_TypeError, "linear: 9 arguments expected, %zd given", nargs);
    if (read_sizes("linear", args, 9, v) < 0) return NULL;
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = multiply(v);
    Py_END_ALLOW_THREADS
    if (status) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *rms_norm(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    size_t v[6];
    if (nargs != 7) return PyErr_Format(PyExc_TypeError, "rms_norm: 7 arguments expected, %zd given", nargs);
    if (read_sizes("rms_norm", args, 6, v) < 0) return NULL;
    float epsilon = (float)PyFloat_AsDouble(args[6]);
    if (PyErr_Occurred()) return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (v[5] == F32)
        rms_norm_f32((const float *)v[0], (const float *)v[1], (float *)v[2], v[3], v[4], epsilon);
    else
        rms_norm_bf16((const uint16_t *)v[0], (const uint16_t *)v[1], (uint16_t *)v[2], v[3], v[4], epsilon);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* The numbers are those of `Attention`, in its order, after five addresses and before the scale. */
static PyObject *attention(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    size_t v[23];
    if (nargs != 24) return PyErr_Format(PyExc_TypeError, "attention: 24 arguments expected, %zd given", nargs);
    if (read_sizes("attention", args, 23, v) < 0) return NULL;
    Attention is;
    memcpy(&is, v + 5, 17 * sizeof(size_t));
    is.scale = (float)PyFloat_AsDouble(args[23]);
    if (PyErr_Occurred()) return NULL;
    float *work = malloc(attention_work_bytes(&is));
    if (!work) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    if (v[22] == F32)
        attention_f32(&is, (const float *)v[0], (const float *)v[1], (const float *)v[2], (const char *)v[3],
                      (float *)v[4], work);
    else
        attention_bf16(&is, (const uint16_t *)v[0], (const uint16_t *)v[1], (const uint16_t *)v[2],
                       (const char *)v[3], (uint16_t *)v[4], work);
    Py_END_ALLOW_THREADS
    free(work);
    Py_RETURN_NONE;
}

static int read_floats(PyObject *const *args, Py_ssize_t count, float *values)
{
    for (Py_ssize_t i = 0; i < count; i++) values[i] = (float)PyFloat_AsDouble(args[i]);
    return PyErr_Occurred() ? -1 : 0;
}

/* The numbers are those of `AttentionHalf`, in its order; then the three norms' epsilons and the scale of the scores. */
static PyObject *attention_half(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    enum { SIZES = sizeof(AttentionHalf) / sizeof(size_t), FLOATS = 4 };
    AttentionHalf is;
    float v[FLOATS];
    if (nargs != SIZES + FLOATS)
        return PyErr_Format(PyExc_TypeError, "attention_half: %d arguments expected, %zd given", SIZES + FLOATS, nargs);
    if (read_sizes("attention_half", args, SIZES, (size_t *)&is) < 0) return NULL;
    if (read_floats(args + SIZES, FLOATS, v) < 0) return NULL;
    float *work = malloc(attention_half_work_bytes(&is));
    if (!work) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    attend(&is, v, work);
    Py_END_ALLOW_THREADS
    free(work);
    Py_RETURN_NONE;
}

/* The numbers are those of `FeedHalf`, in its order; then the norm's epsilon. */
static PyObject *feed_half(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    enum { SIZES = sizeof(FeedHalf) / sizeof(size_t) };
    FeedHalf is;
    float epsilon;
    if (nargs != SIZES + 1)
        return PyErr_Format(PyExc_TypeError, "feed_half: %d arguments expected, %zd given", SIZES + 1, nargs);
    if (read_sizes("feed_half", args, SIZES, (size_t *)&is) < 0) return NULL;
    if (read_floats(args + SIZES, 1, &epsilon) < 0) return NULL;
    float *work = malloc(feed_half_work_bytes(&is));
    if (!work) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    feed(&is, epsilon, work);
    Py_END_ALLOW_THREADS
    free(work);
    Py_RETURN_NONE;
}

/* The kernel that sums or None, the kind of the sums, and a bytes object of `Layer`s; then the numbers of `Shared`, in
 * its order; then those of `Cached`, in its order, for each layer. Returns what `Kernel.all_reduce` returns. */
static PyObject *decoder_layers(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    enum { FIRST = 3, SHARED = sizeof(Shared) / sizeof(size_t), CACHED = sizeof(Cached) / sizeof(size_t) };
    if (nargs < FIRST + SHARED || !PyBytes_Check(args[2]) || PyBytes_GET_SIZE(args[2]) % sizeof(Layer))
        return PyErr_Format(PyExc_TypeError, "decoder_layers: a kernel, a kind, bytes and %d numbers expected", SHARED);
    size_t count = (size_t)PyBytes_GET_SIZE(args[2]) / sizeof(Layer), numbers = (size_t)nargs - FIRST - SHARED;
    if (!count || numbers != count * CACHED)
        return PyErr_Format(PyExc_TypeError, "decoder_layers: %zu numbers of caches for %zu layers", numbers, count);
    Stack stack = {.layers = (const Layer *)PyBytes_AS_STRING(args[2]), .count = count};
    if (args[0] != Py_None) {
        stack.kernel = args[0];
        stack.sums = PyCapsule_Import(KERNEL_API, 0);
        if (!stack.sums) return NULL;
    }
    stack.sum_kind = PyLong_AsSize_t(args[1]);
    for (size_t i = 0; i < count && !stack.sums; i++)
        if (stack.layers[i].attention_is_partial || stack.layers[i].feed_is_partial)
            return PyErr_Format(PyExc_ValueError, "decoder_layers: layer %zu is to be summed, and nothing sums", i);
    if (PyErr_Occurred()) return NULL;
    if (read_sizes("decoder_layers", args + FIRST, SHARED, (size_t *)&stack.shared) < 0) return NULL;
    Cached *caches = malloc(numbers * sizeof(size_t));
    float *work = malloc(stack_work_bytes(&stack));
    PyObject *result = NULL;
    if (!caches || !work) PyErr_NoMemory();
    else if (read_numbers(args + FIRST + SHARED, (Py_ssize_t)numbers, (size_t *)caches) == 0) {
        stack.caches = caches;
        result = run_stack(&stack, work);
    }
    free(caches), free(work);
    return result;
}

static PyMethodDef methods[] = {
    {"linear", (PyCFunction)(void (*)(void))linear, METH_FASTCALL,
     "linear(x, weight, bias, out, rows, in_features, weight_stride, out_features, kind)"},
    {"rms_norm", (PyCFunction)(void (*)(void))rms_norm, METH_FASTCALL,
     "rms_norm(x, weight, out, rows, width, kind, epsilon)"},
    {"attention", (PyCFunction)(void (*)(void))attention, METH_FASTCALL,
     "attention(q, k, v, mask, out, batch, heads, kv_heads, tokens, width, value_width, q_batch, q_head, k_batch,\n"
     "          k_head, k_token, v_batch, v_head, v_token, mask_batch, mask_head, mask_kind, kind, scale)"},
    {"attention_half", (PyCFunction)(void (*)(void))attention_half, METH_FASTCALL,
     "attention_half(*AttentionHalf, epsilon, q_epsilon, k_epsilon, scale)"},
    {"feed_half", (PyCFunction)(void (*)(void))feed_half, METH_FASTCALL, "feed_half(*FeedHalf, epsilon)"},
    {"decoder_layers", (PyCFunction)(void (*)(void))decoder_layers, METH_FASTCALL,
     "decoder_layers(kernel, sum_kind, layers, *Shared, *caches)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "parallelformers_ng.kernels._decode",
    .m_doc = "Parts of a decode step, in C.", .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__decode(void) { return PyModule_Create(&module); }
