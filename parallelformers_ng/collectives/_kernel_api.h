/* What `_kernel` lends to other C of this package: sums over the ranks without a way back through Python, in the capsule
 * `_kernel.API`; and how all of it reads its arguments. */

#ifndef PARALLELFORMERS_NG_KERNEL_API_H
#define PARALLELFORMERS_NG_KERNEL_API_H

#include <Python.h>
#include <string.h>

#define KERNEL_API "parallelformers_ng.collectives._kernel.API"

typedef struct {
    /* Before the first sum, with the GIL, which it lets go of; -1 with an exception where there can be no sum now. */
    int (*enter)(PyObject *kernel);
    /* As `Kernel.all_reduce`: 0, or a status after which there can be no other. What lies at `next`, which the caller
     * reads afterwards, comes into the cache while this rank waits; NULL and 0 where nothing does. */
    int (*all_reduce)(PyObject *kernel, void *data, size_t count, size_t kind, const void *next, size_t next_bytes);
    /* After the last sum; takes the GIL. Returns the status as a Python int; NULL with a signal handler's exception. */
    PyObject *(*leave)(PyObject *kernel, int status);
} KernelAPI;

/* What a thread does that looks again and again whether it may go on. */
static inline void cpu_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#endif
}

/* Reads Python integers, of addresses and sizes, into an array, or a struct that has a field for each. */
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
