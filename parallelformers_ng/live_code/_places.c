/* Compares places of code with earlier values: the fast part of `live_code/watch.py`. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

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

static PyObject *are_unchanged(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 5) return PyErr_Format(PyExc_TypeError, "are_unchanged: 5 arguments expected, %zd given", nargs);
    for (Py_ssize_t i = 0; i < nargs; i++)
        if (!PyTuple_Check(args[i])) return PyErr_Format(PyExc_TypeError, "are_unchanged: argument %zd is not a tuple", i + 1);
    PyObject *tables = args[0], *keys = args[1], *values = args[2], *counted = args[3], *sizes = args[4];
    const Py_ssize_t count = PyTuple_GET_SIZE(tables), classes = PyTuple_GET_SIZE(counted);
    if (PyTuple_GET_SIZE(keys) != count || PyTuple_GET_SIZE(values) != count || PyTuple_GET_SIZE(sizes) != classes)
        return PyErr_Format(PyExc_ValueError, "are_unchanged: tuples of different lengths");
    for (Py_ssize_t i = 0; i < count; i++) {
        const int same = has_objects(PyTuple_GET_ITEM(tables, i), PyTuple_GET_ITEM(keys, i), PyTuple_GET_ITEM(values, i));
        if (same <= 0) return same ? NULL : Py_NewRef(Py_False);
    }
    for (Py_ssize_t i = 0; i < classes; i++) {
        PyObject *table = PyTuple_GET_ITEM(counted, i);
        const Py_ssize_t size = PyLong_AsSsize_t(PyTuple_GET_ITEM(sizes, i));
        if (size == -1 && PyErr_Occurred()) return NULL;
        if (!PyDict_Check(table) || PyDict_Size(table) != size) return Py_NewRef(Py_False);
    }
    return Py_NewRef(Py_True);
}

static PyMethodDef methods[] = {
    {"are_unchanged", (PyCFunction)(void (*)(void))are_unchanged, METH_FASTCALL,
     "are_unchanged(tables, keys, values, counted, sizes, /)\n--\n\n"
     "Return whether each dictionary of `tables` has the very objects of `values` at its `keys`, and each dictionary of\n"
     "`counted` has its number of `sizes` of items."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_places", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit__places(void) { return PyModule_Create(&definition); }
