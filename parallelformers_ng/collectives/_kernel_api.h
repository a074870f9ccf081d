/* Declares the functions of `_kernel` that other C modules of this package call, through the capsule `_kernel.API`: sums
 * over the ranks without a call of Python. Also reads the arguments of all C functions. */

#ifndef PARALLELFORMERS_NG_KERNEL_API_H
#define PARALLELFORMERS_NG_KERNEL_API_H

#include <Python.h>
#include <string.h>

#define KERNEL_API "parallelformers_ng.collectives._kernel.API"

typedef struct {
    /* Call it with the GIL before the first sum. Releases the GIL. Returns -1 with an exception if no sum can run now. */
    int (*enter)(PyObject *kernel);
    /* Sums like `Kernel.all_reduce`. Returns 0, or a status after which no other sum can run. While this rank waits, it
     * prefetches `next_bytes` bytes at `next`, which the caller reads afterwards; NULL and 0 for no prefetch. */
    int (*all_reduce)(PyObject *kernel, void *data, size_t count, size_t kind, const void *next, size_t next_bytes);
    /* Call it after the last sum. Takes the GIL. Returns the status as a Python int; NULL if a signal handler raised. */
    PyObject *(*leave)(PyObject *kernel, int status);
} KernelAPI;

/* Tells the processor that this thread spins. */
static inline void cpu_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#endif
}

/* Reads Python integers (addresses and sizes) into an array, or into a struct with a field for each integer. */
static inline int read_numbers(PyObject *const *args, size_t count, void *values)
{
    for (size_t i = 0; i < count; i++) {
        size_t number = PyLong_AsSize_t(args[i]);
        if (number == (size_t)-1 && PyErr_Occurred()) return -1;
        memcpy((char *)values + i * sizeof number, &number, sizeof number);
    }
    return 0;
}

#endif
