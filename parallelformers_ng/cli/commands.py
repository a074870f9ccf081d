"""Runs the commands of `parallelformers-ng`. Each command calls a public function and prints the result.

`parallelformers-ng COMMAND --help` shows the docstring of the command's function.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import operator
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from parallelformers_ng import __version__
from parallelformers_ng.cli import serve as serving
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.option_checks import parse_size, read_options
from parallelformers_ng.options import DTYPES, SCHEMES, STRATEGIES, FitOptions
from parallelformers_ng.planner.devices import device_named
from parallelformers_ng.serving.listening import folder_of
from parallelformers_ng.serving.serve_options import read_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return the exit status.

    The status is 0 for success, 1 if a check failed, 2 after an error, which is printed on standard error, 130 after
    Ctrl-C, and 141 if the program that reads the output has ended.
    """
    options = _parser().parse_args(arguments)
    try:
        status = options.command(options) or 0
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the program that reads the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit does not fail
        return 128 + signal.SIGPIPE
    except (ParallelError, OSError, ValueError) as error:
        print(f"parallelformers-ng: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # the user may press Ctrl-C while `command` still imports torch
        return 130


def plan(options: argparse.Namespace) -> None:
    """Print the plan of a model and the bytes of each rank. With --device, print a forecast instead: whether the model
    fits on the devices, its speed, and the best options. The command reads only the configuration, and needs no weights
    and no GPU.
    """
    chosen = {name: value for name, value in vars(options).items() if value is not None}
    layout: dict[str, Any] = {name: chosen[name] for name in ("ratio", "strategy", "tensor") if name in chosen}
    sizes = {name: chosen[name] for name in ("batch", "length") if name in chosen}
    if options.device is None and sizes:
        raise ParallelError(f"--{next(iter(sizes))} is for a forecast; add --device, for example --device h100")
    if options.device is not None and layout:
        raise ParallelError(f"--{next(iter(layout))} is for a plan; leave it out for a forecast with --device")
    fit = read_options(FitOptions, layout, "fit")
    fit.parts(options.num_gpus)
    import parallelformers_ng
    from parallelformers_ng.checkpoint.model_class import empty_model

    model = empty_model(options.model, options.revision)
    common = {"dtype": options.dtype, "custom_policies": _custom(options), "quantize": options.quantize}
    result: Any
    if options.device is None:
        result = parallelformers_ng.plan(model, options.num_gpus, fit=fit, **common)
    else:
        result = parallelformers_ng.forecast(model, device=options.device, num_gpus=options.num_gpus, **sizes, **common)
    _print(options, result.as_dict(), _of_defaults(options, model) + str(result))


def policies(options: argparse.Namespace) -> None:
    """List every model type of the installed transformers with the source of its policy: 'written' (a file in
    policies/), 'of its parts' (the model only holds other models), 'inferred' (from the model's structure, proven on
    first use), or 'no modelling code of its own'.
    """
    from parallelformers_ng.cli.coverage import policy_sources

    sources = policy_sources()
    lines = [f"{model_type:<40} {source}" for model_type, source in sources.items()]
    _print(options, sources, "\n".join(lines))


def verify(options: argparse.Namespace) -> int:
    """Build a tiny random copy of the model with the same class, head counts and layer pattern, run the copy whole and
    sharded over N ranks, and compare the outputs. With --quantize, also compare a quantized copy. The command reads
    only the configuration. It prints the sharded and the whole tensors, and reasons. The exit status is 1 if the
    outputs differ, 2 if the model is refused.
    """
    from parallelformers_ng.checkpoint.model_class import empty_model
    from parallelformers_ng.cli.coverage import verify_model

    model = empty_model(options.model, options.revision)
    verification = verify_model(model, options.num_gpus, _custom(options), options.quantize)
    _print(options, dataclasses.asdict(verification), _of_defaults(options, model) + str(verification))
    return 0 if verification.equal else 1


def shard(options: argparse.Namespace) -> None:
    """Write the shards of a checkpoint for N ranks, with one tensor in memory at a time, without starting workers. Each
    worker of parallelize(OUT) then reads only its own files.
    """
    from parallelformers_ng.model.saving import shard as write_shards

    size, arguments = options.max_shard_size, {"revision": options.revision, "quantize": options.quantize}
    write_shards(options.model, options.output, options.num_gpus, max_shard_size=size, **arguments)


def bench(options: argparse.Namespace) -> None:
    """Measure how fast MODEL reads a prompt (prefill) and makes tokens (decode, greedy, one sequence) on N ranks and,
    in turn, in one process with all threads. Print the tokens per second of the median and the best round. Also print
    the share of the measured memory bandwidth that decode steps use; a decode step reads every weight once. A
    config.json or a model type ('llama') gets random weights. Memory must hold two copies of the model, or one copy
    with --no-baseline. Run no other program during the measurement.
    """
    from parallelformers_ng.cli import bench as benchmark

    arguments = {name: value for name, value in vars(options).items() if name not in ("command", "json")}
    report = benchmark.bench(**arguments, say=lambda text: print(text, file=sys.stderr))
    _print(options, report.as_dict(), str(report))


def health(options: argparse.Namespace) -> int:
    """Show each group of workers of the process PID: for each rank its process id and state, its steps of collectives,
    the method that it runs, and a traceback. The process goes on meanwhile, and may hang itself. The exit status is 1
    if the process has no groups, has ended, or belongs to another user.
    """
    from parallelformers_ng.runtime.inspection import reports_of

    try:
        print("\n\n".join(reports_of(options.pid)))
    except ParallelError as error:
        print(f"parallelformers-ng: {error}", file=sys.stderr)
        return 1
    return 0


def _custom(options: argparse.Namespace) -> Any:
    from parallelformers_ng.sharding.policy_registry import policies_of_file

    return None if options.policy is None else policies_of_file(options.policy)


def _of_defaults(options: argparse.Namespace, model: Any) -> str:
    """Return a note for the output if `model` has the default configuration of a model type; "" otherwise."""
    from parallelformers_ng.checkpoint.model_class import is_model_type

    if not is_model_type(options.model):
        return ""
    config = type(model.config).__name__
    return f"{options.model!r} is a model type: the result is for the default configuration, {config}()\n"


def _print(options: argparse.Namespace, data: Any, text: str) -> None:
    print(json.dumps(data, indent=1) if options.json else text)


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports a wrong argument in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help lists the arguments\n")


def _numbers(text: str) -> list[float]:
    try:
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} has no numbers with commas, such as 1,3") from None


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def _checked(check: Callable[[str], object]) -> Callable[[str], str]:
    """Make a function for argparse's `type=` that returns a text unchanged if `check(text)` raises no ParallelError."""

    def convert(text: str) -> str:
        try:
            check(text)
        except ParallelError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return convert


def _parser() -> argparse.ArgumentParser:
    about = "Tensor parallelism for Hugging Face models. Each command has its own --help."
    parser = _Parser("parallelformers-ng", description=about)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(run: Callable[[argparse.Namespace], int | None], text: str, *parents: _Parser) -> argparse.ArgumentParser:
        """Add a command with the name of the function `run`, whose docstring is the long help of the command."""
        command = commands.add_parser(run.__name__, parents=parents, help=text, description=run.__doc__)
        command.set_defaults(command=run)
        return command

    model = _Parser(add_help=False)
    folder = _checked(lambda name: folder_of(name, "config.json"))
    about = "a model folder, a config.json or a name on the Hugging Face hub"
    model.add_argument("model", type=folder, metavar="MODEL", help=about)
    model.add_argument("--num-gpus", type=_count, default=2, metavar="N", help="number of ranks (default: 2)")
    model.add_argument("--revision", help="branch, tag or commit of a model on the hub")
    output = _Parser(add_help=False)
    output.add_argument("--json", action="store_true", help="print JSON instead of text")
    bits = _Parser(add_help=False)
    about = f"hold weights in {', '.join(SCHEMES)} (default: the model's data type)"
    bits.add_argument("--quantize", choices=SCHEMES, metavar="SCHEME", help=about)
    policy = _Parser(add_help=False)
    about = "your own policies, tried before those of this library"
    readable = _checked(lambda path: read_text(path, "policy"))
    policy.add_argument("--policy", type=readable, metavar="FILE.py", help=about)
    dtype = _Parser(add_help=False)
    about = "data type of the weights: float16, bfloat16, float32 (default: the model's)"
    short = operator.methodcaller("removeprefix", "torch.")
    dtype.add_argument("--dtype", type=short, choices=("auto", *DTYPES), metavar="TYPE", help=about)

    command = add(plan, "print the plan of a model, and the bytes of each rank", model, policy, bits, dtype, output)
    about = "relative share of each rank: 1,3 (default: equal shares)"
    command.add_argument("--ratio", type=_numbers, metavar="R,R,…", help=about)
    about = "tensor: a part of every layer on each rank; pipeline: whole layers; tensor+pipeline (default: tensor)"
    command.add_argument("--strategy", choices=STRATEGIES, metavar="STRATEGY", help=about)
    command.add_argument("--tensor", type=_count, metavar="N", help="ranks of each stage, for tensor+pipeline")
    about = "Memory of each device, tokens per second and the best strategy, from data sheets."
    flags = command.add_argument_group("forecast", about)
    about = "h100, h200, a100, l40s, …; a wrong name lists all names"
    flags.add_argument("--device", type=_checked(device_named), metavar="NAME", help=about)
    flags.add_argument("--batch", type=_count, metavar="N", help="total of sequences decoded together (default: 1)")
    flags.add_argument("--length", type=_count, metavar="T", help="prompt and new tokens of a sequence (default: 4096)")

    add(policies, "list every model type with the source of its policy", output)

    about = "check a model's policy on a tiny random copy: sharded and whole outputs must match"
    add(verify, about, model, policy, bits, output)

    command = add(shard, "write a checkpoint's shards, with separate files for each rank", model, bits)
    command.add_argument("output", metavar="OUT", help="the directory to write; replaces an existing OUT in one step")
    size, about = _checked(parse_size), "largest size of a file (default: 5GB)"
    command.add_argument("--max-shard-size", type=size, default="5GB", metavar="SIZE", help=about)

    about = "measure prefill and decode speeds on the ranks and in one process"
    command = add(bench, about, model, bits, dtype, output)
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA if available")
    command.add_argument("--prompt", type=_count, default=512, metavar="T", help="tokens of the prompt (default: 512)")
    command.add_argument("--tokens", type=_count, default=64, metavar="T", help="tokens to decode (default: 64)")
    command.add_argument("--rounds", type=_count, default=5, metavar="R", help="repetitions (default: 5)")
    about = "measure only the ranks, not one process"
    command.add_argument("--no-baseline", dest="baseline", action="store_false", help=about)

    command = add(health, "show where the ranks of a running process are")
    command.add_argument("pid", type=_count, metavar="PID", help="a process that uses workers, or a server")

    command = add(serving.serve, "serve a model over HTTP, for clients of OpenAI's interface")
    serving.add_flags(command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
