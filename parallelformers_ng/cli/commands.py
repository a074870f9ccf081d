"""`parallelformers-ng …`: every command parses its arguments, calls a public function and prints what it returns."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from parallelformers_ng import __version__
from parallelformers_ng.cli import device_flags as forecast
from parallelformers_ng.cli import serve as serving
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.options import QUANTIZE_HELP


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0, 1 if a check failed, 2 for a problem that is said on standard error, or 130 after Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except (ParallelError, OSError, ValueError) as error:
        print(f"parallelformers-ng: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # also while torch is imported
        return 130


class _Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, without all of the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help lists what it takes\n")


def plan(options: argparse.Namespace) -> int:
    """Return how the model would be cut, with the bytes of each rank; or what it would need and give on other
    devices."""
    from parallelformers_ng import forecast as make_forecast
    from parallelformers_ng import plan as make_plan
    from parallelformers_ng.checkpoint.model_class import empty_model

    forecast_options = forecast.given(options)
    model, custom = empty_model(options.model, options.revision), _custom(options)
    if forecast_options is not None:
        outlook = make_forecast(model, custom_policies=custom, **forecast_options)
        _print(options, outlook.as_dict(), _of_defaults(options, model) + str(outlook))
        return 0
    fit, bits = {name: getattr(options, name) for name in ("ratio", "strategy", "tensor")}, options.quantize
    shard_plan = make_plan(model, options.num_gpus, dtype=options.dtype, custom_policies=custom, fit=fit, quantize=bits)
    _print(options, shard_plan.as_dict(), _of_defaults(options, model) + shard_plan.table())
    return 0


def policies(options: argparse.Namespace) -> int:
    """Return every model type and where its policy comes from."""
    from parallelformers_ng.cli.coverage import policy_sources

    sources = policy_sources()
    lines = [f"{model_type:<40} {source}" for model_type, source in sources.items()]
    _print(options, sources, "\n".join(lines))
    return 0


def verify(options: argparse.Namespace) -> int:
    """Check the policy on a tiny random copy of the model."""
    from parallelformers_ng.checkpoint.model_class import empty_model
    from parallelformers_ng.cli.coverage import verify_model

    model = empty_model(options.model, options.revision)
    verification = verify_model(model, options.num_gpus, _custom(options), options.quantize)
    _print(options, verification.as_dict(), _of_defaults(options, model) + str(verification))
    return 0 if verification.equal else 1


def shard(options: argparse.Namespace) -> int:
    """Cut a checkpoint into a sharded directory, one tensor in memory at a time."""
    from parallelformers_ng.model.saving import shard as write_shards

    size, arguments = options.max_shard_size, {"revision": options.revision, "quantize": options.quantize}
    write_shards(options.model, options.output, options.num_gpus, max_shard_size=size, **arguments)
    return 0


def bench(options: argparse.Namespace) -> int:
    """Prefill and decode on the workers, against one process."""
    from parallelformers_ng.cli import bench as benchmark

    if options.plot:
        benchmark.check_plotting()  # before minutes of measuring
    report = benchmark.bench(
        options.model,
        options.num_gpus,
        device=options.device,
        prompt=options.prompt,
        tokens=options.tokens,
        rounds=options.rounds,
        baseline=not options.no_baseline,
        dtype=options.dtype,
        revision=options.revision,
        quantize=options.quantize,
        say=lambda text: print(text, file=sys.stderr),
    )
    _print(options, report.as_dict(), str(report))
    if options.plot:
        report.plot(options.plot)
        print(f"saved the plot to {options.plot}", file=sys.stderr)
    return 0


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def _custom(options: argparse.Namespace) -> Any:
    """Return the policies of `--policy`, None without."""
    from parallelformers_ng.sharding.policy_file import policies_of_file

    return None if options.policy is None else policies_of_file(options.policy)


def _of_defaults(options: argparse.Namespace, model: Any) -> str:
    """Return a first line that says so where a bare model type stands for its defaults, as no checkpoint of that
    name does."""
    from parallelformers_ng.checkpoint.model_class import is_model_type

    if not is_model_type(options.model):
        return ""
    config = type(model.config).__name__
    return f"{options.model!r} is a model type: this is its default configuration, {config}(), of no checkpoint\n"


def _print(options: argparse.Namespace, data: Any, text: str) -> None:
    print(json.dumps(data, indent=1) if options.json else text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="parallelformers-ng",
        description="Tensor parallelism for Hugging Face models.",
        epilog="Each command has its own --help.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    model = _Parser(add_help=False)
    model.add_argument("model", metavar="MODEL", help="a model folder, a config.json or a name on the Hugging Face hub")
    model.add_argument("--num-gpus", type=int, default=2, metavar="N", help="number of ranks (default: 2)")
    model.add_argument("--revision", help="branch, tag or commit of a model on the hub")
    output = _Parser(add_help=False)
    output.add_argument("--json", action="store_true", help="print JSON instead of text")

    bits = _Parser(add_help=False)
    bits.add_argument("--quantize", metavar="SCHEME", help=f"{QUANTIZE_HELP} (default: as the model has them)")

    policy = _Parser(add_help=False)
    policy.add_argument("--policy", metavar="FILE.py", help="policies of your own, which come before the written ones")

    command = commands.add_parser(
        "plan",
        parents=[model, policy, bits, output],
        help="print how a model would be cut, and the bytes of each rank",
        description="Print how a model would be cut and how many bytes each rank would hold; or, with --device, whether"
        " it fits on such devices, how fast it would be, and how to lay it out. Reads the configuration alone: no"
        " weights, no GPU.",
    )
    command.add_argument("--dtype", help="count bytes for this type: float16, bfloat16, float32 (default: the model's)")
    command.add_argument(
        "--ratio",
        type=_numbers,
        metavar="R,R,…",
        help="how much each rank holds beside the others: 1,3 (default: alike)",
    )
    command.add_argument(
        "--strategy",
        default="tensor",
        help="tensor: a part of every layer on each rank; pipeline: whole layers; tensor+pipeline (default: tensor)",
    )
    command.add_argument("--tensor", type=int, metavar="N", help="ranks of each stage, for tensor+pipeline")
    forecast.add_flags(command)
    command.set_defaults(command=plan)

    command = commands.add_parser(
        "policies",
        parents=[output],
        help="list every model type with the source of its policy",
        description="List every model type of the installed transformers with the source of its policy: 'written' (a"
        " file in policies/), 'of its parts' (it only holds other models), 'inferred' (from the model's structure,"
        " proven on first use).",
    )
    command.set_defaults(command=policies)

    command = commands.add_parser(
        "verify",
        parents=[model, policy, bits, output],
        help="check a model's policy on a tiny random copy: sharded and whole outputs must match",
        description="Build a tiny random copy of the model (its class, head counts and layer pattern, from the"
        " configuration alone), run it whole and sharded over N ranks, and compare the outputs; with --quantize also"
        " with its weights in few bits. Prints what is cut, what stays whole and why. Exits with 1 if the outputs"
        " differ, with 2 where the model is refused.",
    )
    command.set_defaults(command=verify)

    command = commands.add_parser(
        "shard",
        parents=[model, bits],
        help="cut a checkpoint into files of each rank's own",
        description="Cut a checkpoint for N ranks without starting them or loading it: parallelize(OUT) then reads each"
        " rank's own files. One tensor is in memory at a time.",
    )
    command.add_argument("output", metavar="OUT", help="the directory to write; an earlier one is replaced in one step")
    command.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="bytes of a file (default: 5GB)")
    command.set_defaults(command=shard)

    command = commands.add_parser(
        "bench",
        parents=[model, bits, output],
        help="measure prefill and decode on the ranks, against one process",
        description="Measure how fast MODEL reads a prompt (prefill) and makes tokens (decode, greedy, one sequence) on"
        " N ranks and, turn by turn, in one process with all threads. Prints tokens per second, median and best round,"
        " and which share of the memory bandwidth, measured on the spot, the decode steps use: each of them reads every"
        " weight once. A config.json or a model type ('llama') gets random weights. The model is held twice, once"
        " with --no-baseline. Let nothing else run meanwhile.",
    )
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA if present")
    command.add_argument("--dtype", help="float32, bfloat16, float16 (default: the model's)")
    command.add_argument("--prompt", type=int, default=512, metavar="T", help="tokens of the prompt (default: 512)")
    command.add_argument("--tokens", type=int, default=64, metavar="T", help="tokens to decode (default: 64)")
    command.add_argument("--rounds", type=int, default=5, metavar="R", help="repetitions (default: 5)")
    command.add_argument("--no-baseline", action="store_true", help="leave the one process out")
    command.add_argument("--plot", metavar="OUT.png", help="also draw the figures; needs matplotlib")
    command.set_defaults(command=bench)

    command = commands.add_parser(
        "serve",
        help="serve a model over HTTP, as OpenAI's clients ask for it",
        description="Serve MODEL on N ranks: /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models,"
        " /tokenize, /health, /ready, /metrics, and a page at /. Requests are decoded together. SIGTERM or Ctrl-C"
        " lets those in flight complete and refuses new ones; a second one ends the server at once.",
        epilog=f"The key may be in the variable {serving.KEY_VARIABLE}. Flags count before the"
        " variable, and it before the file.",
    )
    serving.add_flags(command)
    command.set_defaults(command=serving.run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
