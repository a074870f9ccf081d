/* What `_kernel` lends to other C of this package: sums over the ranks without a way back through Python. The capsule
 * `_kernel.API` holds it. */

#ifndef PARALLELFORMERS_NG_KERNEL_API_H
#define PARALLELFORMERS_NG_KERNEL_API_H

#include <Python.h>

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

#endif
