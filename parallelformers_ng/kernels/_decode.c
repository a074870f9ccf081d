/* What a decode step does again and again, with one thread, for Python: linear layers for a few rows and norms
 * (`_linear.h`), attention (`_attention.h`), what layers are made of these (`_layer.h`), and one layer after another
 * (`_stack.h`). */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>

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
