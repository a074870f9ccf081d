"""The one thing pyproject.toml cannot say: the C kernel is optional, without a compiler the install goes on."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "parallelformers_ng.collectives._kernel",
            sources=["parallelformers_ng/collectives/_kernel.c"],
            depends=["parallelformers_ng/collectives/_kernel_sums.h"],
            extra_compile_args=["-O3", "-std=c11"],
            optional=True,
        )
    ]
)
