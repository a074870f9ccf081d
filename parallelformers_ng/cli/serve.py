"""Runs `parallelformers-ng serve`, whose flags are the fields of `ServeOptions`."""

from __future__ import annotations

import argparse
import os
import re
import typing
from dataclasses import MISSING, fields
from typing import Any

from parallelformers_ng.errors import ParallelError

KEY_VARIABLE = "PARALLELFORMERS_API_KEY"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the argument MODEL, the flag `--config`, and a flag for each other field of `ServeOptions`.

    The flags have no defaults, so that the file of `--config` can set an option whose flag is not used.
    """
    from parallelformers_ng.serving.serve_options import ServeOptions, option_texts

    kinds, texts = typing.get_type_hints(ServeOptions), option_texts()
    about = "a file with the same options, with underscores in their names"
    parser.add_argument("--config", metavar="FILE.toml", help=about)
    # An earlier release had this flag. It is still parsed, so that `read_options` can say which option replaces it.
    parser.add_argument("--prefill-chunk", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for option in fields(ServeOptions):
        kind, text, default = kinds[option.name], texts.get(option.name, ""), option.default
        if default not in (None, MISSING, "", False):
            text += f" (default: {default})"
        flag, settings = "--" + option.name.replace("_", "-"), dict[str, Any]()
        if option.name == "model":
            flag, settings = "model", {"metavar": "MODEL", "nargs": "?"}
        elif kind is bool:
            settings["action"] = "store_true"
        else:
            if typing.get_origin(kind) is list:
                settings["nargs"] = "+"
                (kind,) = typing.get_args(kind)
            types = typing.get_args(kind) or (kind,)
            settings["type"] = float if float in types else int if int in types else str
            settings["metavar"] = option.name.rpartition("_")[2].upper()
        parser.add_argument(flag, default=argparse.SUPPRESS, help=text, **settings)


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that flags set, and the API key of `PARALLELFORMERS_API_KEY` if no flag sets it."""
    flags = {name: value for name, value in vars(options).items() if name not in ("config", "command")}
    if (key := os.environ.get(KEY_VARIABLE)) is not None:
        if not key and "api_key" not in flags:  # an empty key would open the server to everybody
            raise ParallelError(f"{KEY_VARIABLE} is empty; set a value, or unset the variable")
        flags.setdefault("api_key", key)
    return flags


def serve(options: argparse.Namespace) -> int:
    """Serve MODEL on N ranks: /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models, /tokenize, /health,
    /ready, /metrics, and a page at /. Requests are decoded together. After SIGTERM or Ctrl-C the server refuses new
    requests and completes running requests; a second signal ends the server at once. The environment variable
    PARALLELFORMERS_API_KEY may hold the key. A flag overrides the variable; the variable overrides the file.
    """
    from parallelformers_ng.serving.listening import check_at_once
    from parallelformers_ng.serving.serve_options import read_serve_options

    flags = given_options(options)
    try:
        serve_options = read_serve_options(options.config, flags)
        check_at_once(serve_options)
    except ParallelError as error:
        text = str(error).removeprefix("fit: ")
        name = re.split(r"\W", text)[0]
        is_flag = name in flags or name == "config"
        raise ParallelError("--" + text.replace(name, name.replace("_", "-"), 1) if is_flag else text) from None
    if serve_options.launcher == "ray":
        from parallelformers_ng.serving.on_ray import serve_on_ray as start
    else:
        from parallelformers_ng.serving.run import serve as start
    return start(serve_options)
