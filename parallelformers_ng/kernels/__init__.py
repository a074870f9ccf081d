"""Computations in C that a rank with one CPU thread does faster than torch does. Optional, as the compiler is."""
