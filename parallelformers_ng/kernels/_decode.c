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

/* Returns working memory at a cache line: the processor loads a tile whose rows divide cache lines at half the speed. */
static float *new_work(size_t bytes) { return aligned_alloc(ALIGNED, rounded_up(bytes + 1, ALIGNED)); }

/* Defines a Python function. Its arguments are the fields of STRUCT, in their order, and then FLOATS floats. The numbers are
 * not checked: `operators.py` and `layer_halves.py` check the tensors. */
#define DEFINE_FUNCTION(NAME, STRUCT, FLOATS)                                                                   \
    static PyObject *py_##NAME(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)            \
    {                                                                                                           \
        enum { SIZES = sizeof(STRUCT) / sizeof(size_t) };                                                       \
        STRUCT is;                                                                                              \
        float floats[FLOATS + 1] = {0};                                                                         \
        if (nargs != SIZES + FLOATS)                                                                            \
            return PyErr_Format(PyExc_TypeError, "%s: %d arguments expected, %zd given", #NAME, SIZES + FLOATS, \
                                nargs);                                                                         \
        if (read_numbers(args, SIZES, &is) < 0) return NULL;                                                    \
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

/* Runs decoder layers for one or more steps. Arguments: a `Kernel` for sums over the ranks, or None if no layer has any; the
 * kind of the sums; a bytes object of `Layer` structs; the address of x; then, step by step, a bytes object of `Cached`
 * structs, one a layer, and the fields of `Step`. Returns a status of `Kernel.all_reduce`. */
static PyObject *py_decoder_layers(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    enum { FIRST = 4, STEP_SIZES = sizeof(Step) / sizeof(size_t), OF_STEP = STEP_SIZES + 1 };
    if (nargs < FIRST || !PyBytes_Check(args[2]) || PyBytes_GET_SIZE(args[2]) % sizeof(Layer) || !PyBytes_GET_SIZE(args[2]))
        return PyErr_Format(PyExc_TypeError, "decoder_layers: expected a kernel, a kind, layers and an address");
    size_t count = (size_t)PyBytes_GET_SIZE(args[2]) / sizeof(Layer), steps = (size_t)(nargs - FIRST) / OF_STEP;
    if ((nargs - FIRST) % OF_STEP || !steps || steps > MAX_STEPS)
        return PyErr_Format(PyExc_TypeError, "decoder_layers: %zd arguments do not fit 1 to %d steps", nargs, MAX_STEPS);
    Stack stack = {.layers = (const Layer *)PyBytes_AS_STRING(args[2]), .count = count, .steps = steps};
    if (args[0] != Py_None) {
        stack.kernel = args[0];
        stack.sums = PyCapsule_Import(KERNEL_API, 0);
        if (!stack.sums) return NULL;
    }
    stack.sum_kind = PyLong_AsSize_t(args[1]);
    if (PyErr_Occurred()) return NULL;
    if (read_numbers(args + FIRST - 1, 1, &stack.x) < 0) return NULL;
    for (size_t i = 0; i < steps; i++) {
        PyObject *const *step = args + FIRST + i * OF_STEP;
        if (!PyBytes_Check(step[0]) || (size_t)PyBytes_GET_SIZE(step[0]) != count * sizeof(Cached))
            return PyErr_Format(PyExc_TypeError, "decoder_layers: step %zu needs the bytes of %zu caches", i, count);
        stack.caches[i] = (const Cached *)PyBytes_AS_STRING(step[0]);
        if (read_numbers(step + 1, STEP_SIZES, &stack.step[i]) < 0) return NULL;
    }
    float *work = new_work(stack_work_bytes(&stack));
    PyObject *result = work ? run_stack(&stack, work) : PyErr_NoMemory();
    free(work);
    return result;
}

/* Returns whether dictionaries[i].get(keys[i]) is values[i] for all i. Arguments: the three lists. Prefetches each
 * dictionary, first the object and then its keys, because after a step they are in no processor cache. */
static PyObject *py_still_contain(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    enum { AHEAD = 16 };
    int fits = nargs == 3;
    for (Py_ssize_t i = 0; fits && i < nargs; i++)
        fits = PyList_Check(args[i]) && PyList_GET_SIZE(args[i]) == PyList_GET_SIZE(args[0]);
    if (!fits) return PyErr_Format(PyExc_TypeError, "still_contain: expected three lists of equal lengths");
    for (Py_ssize_t i = 0, count = PyList_GET_SIZE(args[0]); i < count; i++) {
        const Py_ssize_t near = i + AHEAD / 2;
        if (i + AHEAD < count) __builtin_prefetch(PyList_GET_ITEM(args[0], i + AHEAD));
        if (near < count && PyDict_Check(PyList_GET_ITEM(args[0], near)))
            __builtin_prefetch(((PyDictObject *)PyList_GET_ITEM(args[0], near))->ma_keys);
        PyObject *value = PyDict_GetItemWithError(PyList_GET_ITEM(args[0], i), PyList_GET_ITEM(args[1], i));
        if (!value && PyErr_Occurred()) return NULL;
        if ((value ? value : Py_None) != PyList_GET_ITEM(args[2], i)) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyObject *py_use_threads(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    size_t threads;
    if (nargs != 1) return PyErr_Format(PyExc_TypeError, "use_threads: 1 argument expected, %zd given", nargs);
    if (read_numbers(args, 1, &threads) < 0) return NULL;
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
    FUNCTION(decoder_layers, "kernel, sum_kind, layers, x, *(caches, *Step)"),
    FUNCTION(still_contain, "dictionaries, keys, values"),
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
    if (made && PyModule_AddIntConstant(made, "MAX_STEPS", MAX_STEPS) < 0) Py_CLEAR(made);
    if (made && PyModule_AddIntConstant(made, "NEXT_BYTES", NEXT_BYTES) < 0) Py_CLEAR(made);
    return made;
}
