"""C kernels for CPU ranks, faster than torch's operators. Installed without a C compiler, the package uses torch."""
