"""What pyproject.toml cannot say: the C kernels are optional, without a compiler the install goes on; and contributors
meet `policies/` at the top of the tree, but it is installed inside the package, so that no top-level name `policies`
ever lands in a site-packages."""

from setuptools import Extension, find_packages, setup


def _headers(folder: str, *names: str) -> list[str]:
    return [f"parallelformers_ng/{folder}/_{name}.h" for name in names]


setup(
    packages=[*find_packages(include=["parallelformers_ng*"]), "parallelformers_ng.policies"],
    package_dir={"parallelformers_ng.policies": "policies"},
    ext_modules=[
        Extension(
            "parallelformers_ng.collectives._kernel",
            sources=["parallelformers_ng/collectives/_kernel.c"],
            depends=_headers("collectives", "kernel_api", "kernel_protocol", "kernel_sums", "floats"),
            extra_compile_args=["-O3", "-std=c11"],
            optional=True,
        ),
        Extension(
            "parallelformers_ng.kernels._decode",
            sources=["parallelformers_ng/kernels/_decode.c"],
            depends=_headers(
                "kernels",
                "team",
                "vectors",
                "integers",
                "limbs",
                "byte_tiles",
                "tiles",
                "linear",
                "attention",
                "layer",
                "stack",
            )
            + _headers("collectives", "kernel_api", "floats"),
            libraries=["m", "pthread"],
            extra_compile_args=["-O3", "-std=c11", "-ffp-contract=fast"],
            optional=True,
        ),
    ],
)
