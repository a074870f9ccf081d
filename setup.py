"""The one thing pyproject.toml cannot say: the C kernels are optional, without a compiler the install goes on."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "parallelformers_ng.collectives._kernel",
            sources=["parallelformers_ng/collectives/_kernel.c"],
            depends=["parallelformers_ng/collectives/_kernel_sums.h", "parallelformers_ng/collectives/_floats.h"],
            extra_compile_args=["-O3", "-std=c11"],
            optional=True,
        ),
        Extension(
            "parallelformers_ng.kernels._decode",
            sources=["parallelformers_ng/kernels/_decode.c"],
            depends=[
                "parallelformers_ng/collectives/_floats.h",
                "parallelformers_ng/kernels/_vectors.h",
                "parallelformers_ng/kernels/_attention.h",
                "parallelformers_ng/kernels/_layer.h",
            ],
            libraries=["m"],
            extra_compile_args=["-O3", "-std=c11", "-ffp-contract=fast"],
            optional=True,
        ),
    ]
)
