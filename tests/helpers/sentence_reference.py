"""Computes embeddings with sentence-transformers: `python -m tests.helpers.sentence_reference TEXTS OUT FOLDER…`.

The evaluators of sentence-transformers import scikit-learn and SciPy, which are larger than all other packages of the
tests. Embedding uses neither, so empty modules replace them.
"""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

from tests.helpers.apart import find_packages

_HEAVY = (
    "scipy", "scipy.sparse", "scipy.stats", "sklearn", "sklearn.cluster", "sklearn.metrics",
    "sklearn.metrics.pairwise", "sklearn.preprocessing",
)  # fmt: skip


def main(texts: str, out: str, *folders: str) -> None:
    """Write the embeddings of some texts to a file, a list of vectors for each folder.

    Args:
        texts: JSON list of the texts.
        out: path of the file, JSON.
        folders: paths of models of sentence-transformers.
    """
    find_packages()
    import transformers  # noqa: F401  (it must look for the packages before the stand-ins exist)

    sys.modules.update({name: MagicMock(__spec__=ModuleSpec(name, None)) for name in _HEAVY})
    from sentence_transformers import SentenceTransformer

    embedded = [SentenceTransformer(folder, device="cpu").encode(json.loads(texts)).tolist() for folder in folders]
    with open(out, "w") as file:
        json.dump(embedded, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
