/* Compares places of code with earlier values: the fast part of `live_code/watch.py`. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* Return 1 if a dictionary has the very objects `values` at `keys`, else 0; -1 with an exception. */
static int has_objects(PyObject *table, PyObject *keys, PyObject *values)
{
    if (!PyDict_Check(table) || !PyTuple_Check(keys) || !PyTuple_Check(values)) return 0;
    const Py_ssize_t count = PyTuple_GET_SIZE(keys);
    if (PyTuple_GET_SIZE(values) != count) return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *value = PyDict_GetItemWithError(table, PyTuple_GET_ITEM(keys, i)); /* borrowed */
        if (value != PyTuple_GET_ITEM(values, i)) return !value && PyErr_Occurred() ? -1 : 0;
    }
    return 1;
}

/* A class that is changed gets another tag, or 0, and so do its subclasses (Include/cpython/object.h). */
static uint32_t tag_of(PyObject *owner) { return PyType_Check(owner) ? ((PyTypeObject *)owner)->tp_version_tag : 0; }

static PyObject *are_unchanged(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 6) return PyErr_Format(PyExc_TypeError, "are_unchanged: 6 arguments expected, %zd given", nargs);
    const Py_ssize_t count = PyTuple_Check(args[0]) ? PyTuple_GET_SIZE(args[0]) : 0;
    for (Py_ssize_t i = 0; i < nargs - 1; i++)
        if (!PyTuple_Check(args[i]) || PyTuple_GET_SIZE(args[i]) != count)
            return PyErr_Format(PyExc_TypeError, "are_unchanged: argument %zd is no tuple of %zd items", i + 1, count);
    if (!PyByteArray_Check(args[5]) || PyByteArray_GET_SIZE(args[5]) != count * (Py_ssize_t)sizeof(uint32_t))
        return PyErr_Format(PyExc_TypeError, "are_unchanged: argument 6 is no bytearray of %zd tags", count);
    uint32_t *tags = (uint32_t *)PyByteArray_AS_STRING(args[5]);
    for (Py_ssize_t i = 0; i < count; i++) {
        const uint32_t tag = tag_of(PyTuple_GET_ITEM(args[4], i));
        if (tag && tag == tags[i]) continue;
        PyObject *table = PyTuple_GET_ITEM(args[0], i);
        const Py_ssize_t size = PyLong_AsSsize_t(PyTuple_GET_ITEM(args[3], i));
        if (size == -1 && PyErr_Occurred()) return NULL;
        if (!PyDict_Check(table) || (size >= 0 && PyDict_Size(table) != size)) return Py_NewRef(Py_False);
        const int same = has_objects(table, PyTuple_GET_ITEM(args[1], i), PyTuple_GET_ITEM(args[2], i));
        if (same <= 0) return same ? NULL : Py_NewRef(Py_False);
        tags[i] = tag;
    }
    return Py_NewRef(Py_True);
}

static int is_part(PyObject *part, PyObject *const *expected) { return (part ? part : Py_None) == *expected; }

static PyObject *have_parts(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2 || !PyTuple_Check(args[0]) || !PyTuple_Check(args[1]) ||
        PyTuple_GET_SIZE(args[1]) != 3 * PyTuple_GET_SIZE(args[0]))
        return PyErr_Format(PyExc_TypeError, "have_parts: a tuple of functions and a tuple of their parts expected");
    const Py_ssize_t count = PyTuple_GET_SIZE(args[0]);
    PyObject *const *expected = &PyTuple_GET_ITEM(args[1], 0);
    for (Py_ssize_t i = 0; i < count; i++, expected += 3) {
        PyObject *function = PyTuple_GET_ITEM(args[0], i);
        if (!PyFunction_Check(function)) return PyErr_Format(PyExc_TypeError, "have_parts: item %zd is no function", i);
        if (!is_part(PyFunction_GET_CODE(function), expected) || !is_part(PyFunction_GET_DEFAULTS(function), expected + 1) ||
            !is_part(PyFunction_GET_KW_DEFAULTS(function), expected + 2))
            return Py_NewRef(Py_False);
    }
    return Py_NewRef(Py_True);
}

static PyMethodDef methods[] = {
    {"are_unchanged", (PyCFunction)(void (*)(void))are_unchanged, METH_FASTCALL,
     "are_unchanged(tables, keys, values, sizes, owners, tags, /)\n--\n\n"
     "Return whether each dictionary of `tables` has the very objects of `values` at its `keys`, and as many items as\n"
     "`sizes` says; -1 allows any number. `owners` has the class of each dictionary, or None. `tags`, a bytearray with 4\n"
     "bytes for each dictionary, zero at first, saves the look at classes that were not changed since the last call."},
    {"have_parts", (PyCFunction)(void (*)(void))have_parts, METH_FASTCALL,
     "have_parts(functions, parts, /)\n--\n\n"
     "Return whether each function has the very `__code__`, `__defaults__` and `__kwdefaults__` of `parts`."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_places", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__places(void) { return PyModule_Create(&definition); }
