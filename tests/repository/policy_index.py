"""Makes the table of POLICY.md that says which file in policies/ shards which family of transformers.

python -m tests.repository.policy_index     write the table of the installed transformers to POLICY.md
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import transformers

from parallelformers_ng.sharding.policy_registry import written_policies

PAGE = Path(__file__).parents[2] / "POLICY.md"
_BEGIN, _END = "<!-- families: begin -->\n\n", "\n<!-- families: end -->\n"
_CLASS = re.compile(r"^class (\w+)", re.MULTILINE)


def files_by_family() -> dict[str, list[str]]:
    """Return family → names of the files whose policies name a class of the family's modelling code, without ".py".

    A family is a folder of `transformers/models` with a file `modeling_*.py`.
    """
    files = {block: policy.__module__.rpartition(".")[2] for policy in written_policies() for block in policy.blocks()}
    families = defaultdict[str, set[str]](set)
    for code in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        family = code.parent.name
        for name in _CLASS.findall(code.read_text()):
            families[family] |= {files[block] for block in (name, f"{family}.{name}") if block in files}
    return {family: sorted(names) for family, names in sorted(families.items()) if names}


def files_by_family_of_page() -> dict[str, list[str]]:
    table = PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0]
    rows = (row.split("|") for row in table.splitlines()[2:])
    return {family.strip(): re.findall(r"\[(\w+)\]", links) for _, family, links, _ in rows}


def main() -> None:
    links = {family: ", ".join(f"[{n}](policies/{n}.py)" for n in names) for family, names in files_by_family().items()}
    table = "".join(f"| {family} | {files} |\n" for family, files in links.items())
    before, _, rest = PAGE.read_text().partition(_BEGIN)
    after = rest.partition(_END)[2]
    PAGE.write_text("".join([before, _BEGIN, "| family | policies |\n| --- | --- |\n", table, _END, after]))


if __name__ == "__main__":
    main()
