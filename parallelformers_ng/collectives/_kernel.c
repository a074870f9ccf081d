/* The shared-memory collectives: one-shot sums, reduce-scatter + gather, and gathers between processes.
 *
 * Each collective consists of steps of `_kernel_protocol.h`, which have the same numbers on all ranks. Every rank adds the
 * data of ranks 0, 1, 2, ... in this order, so all ranks get the same bits. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_kernel_api.h"
#include "_kernel_protocol.h"
#include "_kernel_sums.h"

enum { ALL_REDUCE = 1, ALL_GATHER = 2 };
enum { SEGMENT_ELEMENTS = 32 }; /* segments of a reduce-scatter begin on whole cache lines */

/* ---- the collectives, called without the GIL ---------------------------------------------------------------- */

static int sum_one_shot(Kernel *k, char *data, size_t count, const SumKind *kind, uint64_t signature)
{
    const char *sources[MAX_WORLD_SIZE];
    uint64_t step = next_step(k);
    if (count) memcpy(slot(k, k->rank, step), data, count * kind->bytes);
    int status = exchange(k, step, signature);
    if (status != DONE) return status;
    for (int r = 0; r < k->world_size; r++) sources[r] = r == k->rank ? data : slot(k, r, step);
    kind->sum(data, sources, k->world_size, count);
    return DONE;
}

/* Each rank sums one segment, then copies all other segments. A rank reads all data about twice instead of N - 1 times. */
static int sum_reduce_scatter(Kernel *k, char *data, size_t count, const SumKind *kind, uint64_t signature)
{
    const char *sources[MAX_WORLD_SIZE];
    size_t lines = (count + SEGMENT_ELEMENTS - 1) / SEGMENT_ELEMENTS, width = (size_t)k->world_size;
    size_t segment = (lines + width - 1) / width * SEGMENT_ELEMENTS;
    uint64_t step = next_step(k);
    memcpy(slot(k, k->rank, step), data, count * kind->bytes);
    int status = exchange(k, step, signature);
    if (status != DONE) return status;

    size_t begin = min_size(segment * (size_t)k->rank, count), length = min_size(segment, count - begin);
    size_t offset = begin * kind->bytes;
    for (int r = 0; r < k->world_size; r++) sources[r] = (r == k->rank ? data : slot(k, r, step)) + offset;
    kind->sum(data + offset, sources, k->world_size, length);
    memcpy(slot(k, k->rank, step + 1) + offset, data + offset, length * kind->bytes);
    status = exchange(k, step + 1, signature);
    if (status != DONE) return status;

    for (int r = 0; r < k->world_size; r++) {
        begin = min_size(segment * (size_t)r, count), length = min_size(segment, count - begin);
        offset = begin * kind->bytes;
        if (r != k->rank) memcpy(data + offset, slot(k, r, step + 1) + offset, length * kind->bytes);
    }
    return DONE;
}

static int all_reduce(Kernel *k, char *data, size_t count, size_t code)
{
    const SumKind *kind = &SUM_KINDS[code];
    uint64_t signature = sign(ALL_REDUCE, (uint64_t)count * 8 + code);
    int status;
    do {
        size_t part = min_size(count, k->slot_bytes / kind->bytes);
        int one_shot = k->world_size == 2 || part * kind->bytes <= k->one_shot_bytes;
        status = (one_shot ? sum_one_shot : sum_reduce_scatter)(k, data, part, kind, signature);
        data += part * kind->bytes;
        count -= part;
    } while (count && status == DONE);
    return status;
}

/* Copies bytes [start, start + count) of a block of rows, `row` bytes each, to rows that are `pitch` bytes apart. */
static void place_rows(char *out, size_t pitch, size_t row, const char *source, size_t start, size_t count)
{
    while (count) {
        size_t column = start % row, part = min_size(count, row - column);
        memcpy(out + start / row * pitch + column, source, part);
        source += part, start += part, count -= part;
    }
}

static int all_gather(Kernel *k, const char *in, char *out, size_t outer, size_t pitch, const size_t *rows)
{
    size_t longest = 0, start = 0, own = outer * rows[k->rank];
    uint64_t detail = (uint64_t)outer;
    for (int r = 0; r < k->world_size; r++) {
        detail = detail * 1000003 + rows[r];
        longest = rows[r] > longest ? rows[r] : longest;
    }
    longest *= outer;
    do {
        uint64_t step = next_step(k);
        if (start < own) memcpy(slot(k, k->rank, step), in + start, min_size(own - start, k->slot_bytes));
        int status = exchange(k, step, sign(ALL_GATHER, detail));
        if (status != DONE) return status;
        char *column = out;
        for (int r = 0; r < k->world_size; column += rows[r++]) {
            size_t total = outer * rows[r];
            if (start >= total) continue;
            const char *source = r == k->rank ? in + start : slot(k, r, step);
            place_rows(column, pitch, rows[r], source, start, min_size(total - start, k->slot_bytes));
        }
        start += k->slot_bytes;
    } while (start < longest);
    return DONE;
}

/* ---- the Python functions, which check all arguments except addresses ----------------------------------------- */

static int enter(Kernel *k)
{
    if (!k->header) {
        PyErr_SetString(PyExc_ValueError, "Kernel: used after close()");
        return -1;
    }
    if (k->busy) {
        PyErr_SetString(PyExc_RuntimeError, "Kernel: two threads are in a collective of one rank at the same time");
        return -1;
    }
    k->busy = 1;
    k->thread = PyEval_SaveThread();
    return 0;
}

static PyObject *leave(Kernel *k, int status)
{
    PyEval_RestoreThread(k->thread);
    k->busy = 0;
    return status == INTERRUPTED ? NULL : PyLong_FromLong(status);
}

static inline int aborted(Kernel *k) { return atomic_load_explicit(&k->header->abort, memory_order_acquire) != 0; }

/* Runs a collective between `enter` and `leave`. After an abort, no collective runs, even if all peers have arrived. */
#define RUN(K, COLLECTIVE) (enter(K) < 0 ? NULL : leave(K, aborted(K) ? ABORTED : (COLLECTIVE)))

static PyObject *Kernel_all_reduce(Kernel *k, PyObject *const *args, Py_ssize_t nargs)
{
    size_t v[3], nbytes;
    if (nargs != 3) return PyErr_Format(PyExc_TypeError, "Kernel.all_reduce: 3 arguments expected, %zd given", nargs);
    if (read_numbers(args, 3, v) < 0) return NULL;
    if (v[2] >= SUM_KIND_COUNT || __builtin_mul_overflow(v[1], (size_t)8, &nbytes))
        return PyErr_Format(PyExc_ValueError, "Kernel.all_reduce: count %zu or kind %zu out of range", v[1], v[2]);
    return RUN(k, all_reduce(k, (char *)v[0], v[1], v[2]));
}

static PyObject *Kernel_all_gather(Kernel *k, PyObject *const *args, Py_ssize_t nargs)
{
    size_t v[4], rows[MAX_WORLD_SIZE], pitch = 0, nbytes;
    if (nargs != 4 + k->world_size)
        return PyErr_Format(PyExc_TypeError, "Kernel.all_gather: needs 4 arguments and %d sizes", k->world_size);
    if (read_numbers(args, 4, v) < 0 || read_numbers(args + 4, (size_t)k->world_size, rows) < 0) return NULL;
    for (int r = 0; r < k->world_size; r++)
        if (__builtin_mul_overflow(rows[r], v[3], &rows[r]) || __builtin_add_overflow(pitch, rows[r], &pitch))
            return PyErr_Format(PyExc_ValueError, "Kernel.all_gather: the size of rank %d is out of range", r);
    if (__builtin_mul_overflow(v[2], pitch, &nbytes))
        return PyErr_Format(PyExc_ValueError, "Kernel.all_gather: %zu rows of %zu bytes are out of range", v[2], pitch);
    return RUN(k, all_gather(k, (const char *)v[0], (char *)v[1], v[2], pitch, rows));
}

static PyObject *Kernel_close(Kernel *k, PyObject *Py_UNUSED(none))
{
    if (k->busy) return PyErr_Format(PyExc_RuntimeError, "Kernel.close: a thread is still in a collective");
    k->header = NULL;
    PyBuffer_Release(&k->arena);
    Py_RETURN_NONE;
}

static int fits(const Kernel *k)
{
    const Header *header = k->arena.buf;
    size_t nbytes = (size_t)k->arena.len, all_slots;
    return nbytes >= HEADER_BYTES && header->magic == MAGIC && header->world_size <= MAX_WORLD_SIZE &&
           (k->first ? (uint64_t)k->first >= header->world_size : (uint64_t)k->world_size == header->world_size) &&
           (size_t)k->first + (size_t)k->world_size <= places(header) &&
           header->slot_bytes >= 64 && header->slot_bytes % 64 == 0 &&
           !__builtin_mul_overflow((size_t)header->slot_bytes, 2 * places(header), &all_slots) &&
           nbytes >= slots_offset(header) && nbytes - slots_offset(header) >= all_slots;
}

static int Kernel_init(Kernel *k, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    double timeout;
    if (!PyArg_ParseTuple(args, "w*iid|i", &k->arena, &k->rank, &k->world_size, &timeout, &k->first)) return -1;
    if (k->world_size < 1 || k->world_size > MAX_WORLD_SIZE || k->rank < 0 || k->rank >= k->world_size || k->first < 0 ||
        !(timeout > 0 && timeout < 1e9) || !fits(k)) {
        PyBuffer_Release(&k->arena);
        PyErr_Format(PyExc_ValueError, "Kernel: rank %d, world size %d, first place %d and timeout do not fit this arena",
                     k->rank, k->world_size, k->first);
        return -1;
    }
    k->timeout_ns = (uint64_t)(timeout * 1e9);
    k->header = k->arena.buf;
    k->spins = k->header->may_spin ? SPINS : 0;
    k->slot_bytes = (size_t)k->header->slot_bytes;
    k->one_shot_bytes = (size_t)k->header->one_shot_bytes;
    return 0;
}

static void Kernel_dealloc(Kernel *k)
{
    PyBuffer_Release(&k->arena);
    Py_TYPE(k)->tp_free((PyObject *)k);
}

#define FAST(FUNCTION) (PyCFunction)(void (*)(void))FUNCTION, METH_FASTCALL

static PyMethodDef kernel_methods[] = {
    {"all_reduce", FAST(Kernel_all_reduce), "all_reduce(address, count, kind)"},
    {"all_gather", FAST(Kernel_all_gather), "all_gather(source, destination, outer, unit_bytes, *sizes)"},
    {"close", (PyCFunction)Kernel_close, METH_NOARGS, "Releases the arena."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject kernel_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "parallelformers_ng.collectives._kernel.Kernel",
    .tp_doc = "Kernel(arena, rank, world_size, timeout, first=0): collectives on memory addresses; each returns a status.",
    .tp_basicsize = sizeof(Kernel),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Kernel_init,
    .tp_dealloc = (destructor)Kernel_dealloc,
    .tp_methods = kernel_methods,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "parallelformers_ng.collectives._kernel",
    .m_doc = "Shared-memory collectives in C.", .m_size = -1,
};

/* ---- functions for other C modules ---------------------------------------------------------------------------- */

static int api_enter(PyObject *kernel)
{
    if (!PyObject_TypeCheck(kernel, &kernel_type)) {
        PyErr_Format(PyExc_TypeError, "a Kernel is needed for sums over the ranks, not a %s", Py_TYPE(kernel)->tp_name);
        return -1;
    }
    return enter((Kernel *)kernel);
}

static int api_all_reduce(PyObject *kernel, void *data, size_t count, size_t kind, const void *next, size_t next_bytes)
{
    Kernel *k = (Kernel *)kernel;
    if (aborted(k)) return ABORTED;
    k->next = next, k->next_end = k->next + next_bytes;
    int status = all_reduce(k, data, count, kind);
    k->next = k->next_end = NULL;
    return status;
}

static PyObject *api_leave(PyObject *kernel, int status) { return leave((Kernel *)kernel, status); }

static const KernelAPI api = {api_enter, api_all_reduce, api_leave};

PyMODINIT_FUNC PyInit__kernel(void)
{
    PyObject *self = PyModule_Create(&module);
    if (self && PyModule_AddType(self, &kernel_type) < 0) Py_CLEAR(self);
    PyObject *capsule = PyCapsule_New((void *)&api, KERNEL_API, NULL);
    if (self && PyModule_AddObjectRef(self, "API", capsule) < 0) Py_CLEAR(self);
    Py_XDECREF(capsule);
    return self;
}
