"""Parts of the build that pyproject.toml cannot express. The C kernels are optional: without a compiler the install
goes on. Contributors meet `policies/` at the top of the tree; the link `parallelformers_ng/policies` makes it a part of
the package."""

import os
from glob import glob

from setuptools import Extension, find_packages, setup

# A zip archive of the repository has a file instead of the link.
is_linked = os.path.isdir("parallelformers_ng/policies")
HEADERS = sorted(glob("parallelformers_ng/*/_*.h"))

setup(
    packages=find_packages(include=["parallelformers_ng*"]) + ([] if is_linked else ["parallelformers_ng.policies"]),
    package_dir={} if is_linked else {"parallelformers_ng.policies": "policies"},
    ext_modules=[
        Extension(
            "parallelformers_ng.collectives._kernel",
            sources=["parallelformers_ng/collectives/_kernel.c"],
            depends=HEADERS,
            extra_compile_args=["-O3", "-std=c11"],
            optional=True,
        ),
        Extension(
            "parallelformers_ng.live_code._places",
            sources=["parallelformers_ng/live_code/_places.c"],
            extra_compile_args=["-O3", "-std=c11"],
            optional=True,
        ),
        Extension(
            "parallelformers_ng.kernels._decode",
            sources=["parallelformers_ng/kernels/_decode.c"],
            depends=HEADERS,
            libraries=["m", "pthread"],
            extra_compile_args=["-O3", "-std=c11", "-ffp-contract=fast"],
            optional=True,
        ),
    ],
)
