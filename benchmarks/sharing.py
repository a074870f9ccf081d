"""Finds the model types of transformers that share a batch, with a tiny random model of each type on CPU.

python -m benchmarks.sharing [--types llama,gpt2] [--timeout 60] [--json OUT]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.zoo import Worker
from tests.zoo.catalogue import generating_classes, model_classes


def main(arguments: Sequence[str] | None = None) -> int:
    """Print for each type whether its calls share a batch, or why not; return 1 if a type has wrong tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--types", help="comma-separated model types (default: all types with `generate`)")
    parser.add_argument("--timeout", type=float, default=60.0, help="processor seconds for one type (default: 60)")
    parser.add_argument("--json", help="output file of the results")
    options = parser.parse_args(arguments)
    print(measure.machine())
    worker, verdicts = Worker("1", "shares"), list[dict[str, Any]]()
    for name in options.types.split(",") if options.types else sorted(filter(generating_classes, model_classes())):
        answers, problem = worker.judge(name, options.timeout)
        verdicts += answers or [{"model_type": name, "model_class": "", "status": "unbuilt", "reason": problem}]
        last = verdicts[-1]
        print(f"{last['status']:<8} {name} ({last['model_class']})  {last['reason'][:200]}", flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(verdicts, indent=1) + "\n")
    worker.close()
    count = Counter(each["status"] for each in verdicts)
    print(f"of {len(verdicts)} model types:", ", ".join(f"{number} {what}" for what, number in count.most_common()))
    generating = len(verdicts) - count["encoder"] - count["no text"]
    print(f"{count['shares']} of the {generating} that generate text without an encoder share a batch")
    return int(count["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
