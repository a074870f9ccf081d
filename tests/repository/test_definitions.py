"""Tests that readers find the code: each family's policies, policies in an editor, and methods of generated classes."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from transformers import GenerationMixin

from parallelformers_ng.model import remote_module
from parallelformers_ng.model.remote_module import replaced
from tests.repository.policy_index import PAGE, files_by_family, files_by_family_of_page

ROOT = PAGE.parent


def test_every_family_is_in_the_index_of_policies() -> None:
    """An older release of transformers has fewer families, and fewer classes in a family."""
    families, listed = files_by_family(), files_by_family_of_page()
    assert families.keys() <= listed.keys(), "run python -m tests.repository.policy_index"
    assert all(set(files) <= set(listed[family]) for family, files in families.items())
    if families.keys() == listed.keys():
        assert families == listed


def test_editors_find_the_policies() -> None:
    """An editor takes `parallelformers_ng.policies.llama` for this path, without running any code."""
    link = ROOT / "parallelformers_ng" / "policies"
    assert link.is_symlink()
    assert (link / "llama.py").samefile(ROOT / "policies" / "llama.py")
    assert "policies" not in (ROOT / "parallelformers_ng" / "__init__.py").read_text()


def test_replaced_method_names_the_code_that_runs() -> None:
    method = replaced("generated", "generate", GenerationMixin.generate)
    text = inspect.getdoc(method)
    assert text is not None
    assert text.startswith(inspect.getdoc(GenerationMixin.generate) or "none")
    match = re.search(r"runs `(\w+)` of (\S+\.py) instead\.$", text)
    assert match is not None
    assert Path(remote_module.__file__).samefile(ROOT / match[2])
    assert inspect.isfunction(getattr(remote_module, match[1]))
