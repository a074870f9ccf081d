"""C kernels for CPU ranks, faster than torch's operators. Without a C compiler at installation, torch computes."""
