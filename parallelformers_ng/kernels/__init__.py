"""Computations in C that a CPU rank does faster than torch does. Optional, as the compiler is."""
