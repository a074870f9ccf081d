/* The Python module of the kernels: linear layers for a few rows and norms (`_linear.h`), attention (`_attention.h`), the
 * halves of decoder layers (`_layer.h`), and all layers of a rank (`_stack.h`). Threads divide the products (`_team.h`). */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>

#include "../collectives/_kernel_api.h"
#include "_attention.h"
#include "_layer.h"
#include "_limbs.h"
#include "_linear.h"
#include "_matrix.h"
#include "_pairs.h"
#include "_queries.h"
#include "_stack.h"
#include "_team.h"
#include "_tiles.h"
#include "_vectors.h"

/* Reads Python integers into a struct whose last field is a kind. Addresses are not checked. */
static int read_struct(const char *who, PyObject *const *args, size_t count, void *values)
{
    if (read_numbers(args, count, values) < 0) return -1;
    size_t kind = PyLong_AsSize_t(args[count - 1]);
    if (kind > BF16) {
        PyErr_Format(PyExc_ValueError, "%s: kind %zu is neither 0 (fp32) nor 1 (bf16)", who, kind);
        return -1;
    }
    return 0;
}

/* Returns working memory at a cache line: the processor loads a tile whose rows divide cache lines at half the speed. */
static float *new_work(size_t bytes) { return aligned_alloc(ALIGNED, rounded_up(bytes + 1, ALIGNED)); }

/* Defines a Python function. Its arguments are the fields of STRUCT, in their order, and then FLOATS floats. */
#define DEFINE_FUNCTION(NAME, STRUCT, FLOATS)                                                                   \
    static PyObject *py_##NAME(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)            \
    {                                                                                                           \
        enum { SIZES = sizeof(STRUCT) / sizeof(size_t) };                                                       \
        STRUCT is;                                                                                              \
        float floats[FLOATS + 1] = {0};                                                                         \
        if (nargs != SIZES + FLOATS)                                                                            \
            return PyErr_Format(PyExc_TypeError, "%s: %d arguments expected, %zd given", #NAME, SIZES + FLOATS, \
                                nargs);                                                                         \
        if (read_struct(#NAME, args, SIZES, &is) < 0) return NULL;                                              \
        for (size_t i = 0; i < FLOATS; i++) floats[i] = (float)PyFloat_AsDouble(args[SIZES + i]);               \
        if (PyErr_Occurred()) return NULL;                                                                      \
        float *work = new_work(NAME##_work_bytes(&is));                                                         \
        if (!work) return PyErr_NoMemory();                                                                     \
        Py_BEGIN_ALLOW_THREADS                                                                                  \
        NAME(&is, floats, work);                                                                                \
        Py_END_ALLOW_THREADS                                                                                    \
        free(work);                                                                                             \
        Py_RETURN_NONE;                                                                                         \
    }

DEFINE_FUNCTION(linear, Linear, 0)
DEFINE_FUNCTION(rms_norm, RmsNorm, 1)
DEFINE_FUNCTION(attention, Attention, 1)
DEFINE_FUNCTION(attention_half, AttentionHalf, 4)
DEFINE_FUNCTION(feed_half, FeedHalf, 1)

/* Runs decoder layers for one or more steps. Arguments: a `Kernel` for sums over the ranks, or None; the kind of the sums; a
 * bytes object of `Layer` structs; the address of x; the fields of each `Step`; then, step by step, the fields of `Cached` for
 * each layer. Returns a status of `Kernel.all_reduce`. */
static PyObject *py_decoder_layers(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    enum { FIRST = 4, STEP_SIZES = sizeof(Step) / sizeof(size_t), CACHED = sizeof(Cached) / sizeof(size_t) };
    if (nargs < FIRST || !PyBytes_Check(args[2]) || PyBytes_GET_SIZE(args[2]) % sizeof(Layer) || !PyBytes_GET_SIZE(args[2]))
        return PyErr_Format(PyExc_TypeError, "decoder_layers: expected a kernel, a kind, layers and an address");
    size_t count = (size_t)PyBytes_GET_SIZE(args[2]) / sizeof(Layer), of_step = STEP_SIZES + count * CACHED;
    size_t numbers = (size_t)nargs - FIRST, steps = numbers / of_step;
    if (numbers % of_step || !steps || steps > MOST_STEPS)
        return PyErr_Format(PyExc_TypeError, "decoder_layers: %zu numbers do not fit %zu layers and 1 to %d steps", numbers,
                            count, MOST_STEPS);
    numbers = steps * count * CACHED;
    Stack stack = {.layers = (const Layer *)PyBytes_AS_STRING(args[2]), .count = count, .steps = steps};
    if (args[0] != Py_None) {
        stack.kernel = args[0];
        stack.sums = PyCapsule_Import(KERNEL_API, 0);
        if (!stack.sums) return NULL;
    }
    stack.sum_kind = PyLong_AsSize_t(args[1]);
    for (size_t i = 0; i < count && !stack.sums; i++)
        if (stack.layers[i].attention_is_partial || stack.layers[i].feed_is_partial)
            return PyErr_Format(PyExc_ValueError, "decoder_layers: layer %zu needs a kernel for sums over the ranks", i);
    if (PyErr_Occurred()) return NULL;
    if (read_numbers(args + FIRST - 1, 1, &stack.x) < 0) return NULL;
    for (size_t i = 0; i < steps; i++)
        if (read_struct("decoder_layers", args + FIRST + i * STEP_SIZES, STEP_SIZES, &stack.step[i]) < 0) return NULL;
    Cached *caches = malloc(numbers * sizeof(size_t));
    float *work = new_work(stack_work_bytes(&stack));
    PyObject *result = NULL;
    if (!caches || !work) PyErr_NoMemory();
    else if (read_numbers(args + FIRST + steps * STEP_SIZES, numbers, caches) == 0) {
        stack.caches = caches;
        result = run_stack(&stack, work);
    }
    free(caches), free(work);
    return result;
}

/* Converts a mask into spans. The arguments are the fields of `Seen`. Returns whether spans can express the mask. */
static PyObject *py_spans(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    enum { SIZES = sizeof(Seen) / sizeof(size_t) };
    Seen seen;
    if (nargs != SIZES) return PyErr_Format(PyExc_TypeError, "spans: %d arguments expected, %zd given", SIZES, nargs);
    if (read_numbers(args, SIZES, &seen) < 0) return NULL;
    if (!seen.queries || seen.queries > seen.tokens)
        return PyErr_Format(PyExc_ValueError, "spans: %zu queries, but 1 to %zu are possible", seen.queries, seen.tokens);
    return PyBool_FromLong(are_spans(&seen));
}

static PyObject *py_use_threads(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    size_t threads;
    if (nargs != 1) return PyErr_Format(PyExc_TypeError, "use_threads: 1 argument expected, %zd given", nargs);
    if (read_numbers(args, 1, &threads) < 0) return NULL;
    if (!threads) return PyErr_Format(PyExc_ValueError, "use_threads: threads must be at least 1");
    set_team(threads);
    Py_RETURN_NONE;
}

#define FUNCTION(NAME, ARGUMENTS) \
    {#NAME, (PyCFunction)(void (*)(void))py_##NAME, METH_FASTCALL, #NAME "(" ARGUMENTS ")"}

static PyMethodDef methods[] = {
    FUNCTION(linear, "*Linear"),
    FUNCTION(rms_norm, "*RmsNorm, epsilon"),
    FUNCTION(attention, "*Attention, scale"),
    FUNCTION(attention_half, "*AttentionHalf, epsilon, q_epsilon, k_epsilon, scale"),
    FUNCTION(feed_half, "*FeedHalf, epsilon"),
    FUNCTION(decoder_layers, "kernel, sum_kind, layers, x, *steps, *caches"),
    FUNCTION(spans, "*Seen"),
    FUNCTION(use_threads, "threads"),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "parallelformers_ng.kernels._decode",
    .m_doc = "Parts of a decode step, in C.", .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__decode(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "HAS_TILES", has_tiles()) < 0) Py_CLEAR(made);
    if (made && PyModule_AddIntConstant(made, "HAS_PAIRS", has_pairs()) < 0) Py_CLEAR(made);
    return made;
}
