"""Tests the promises of SECURITY.md: no listening sockets, no files with names, no code from unsigned bytes."""

from __future__ import annotations

import ast
import ipaddress
import os
import re
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from parallelformers_ng import parallelize, start_group
from parallelformers_ng.errors import ChannelClosedError, GroupError, NotPortableError, ProtocolError
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.wire.frame import FIXED_PART, FileDescriptor, FrameKind
from parallelformers_ng.wire.message import Encoded, encode, pack
from parallelformers_ng.wire.transport import Channel
from tests.zoo.case import text_inputs
from tests.zoo.decoders import gpt2

PACKAGE = Path(__file__).resolve().parents[2] / "parallelformers_ng"


@pytest.fixture(scope="module", params=["shared_memory", "gloo"])
def group(request) -> Iterator[WorkerGroup]:
    """Yield new workers in normal use: the workers have a model and have answered a call."""
    backend = {"backend": "gloo"} if request.param == "gloo" else {}
    _of_others[:] = sockets(psutil.Process())
    with start_group(2, device="cpu", **backend) as group:
        yield from _with_model(group)


_of_others: list[str] = []
"""Addresses at which this process listened before the workers started, for example for another test."""


def _with_model(group: WorkerGroup) -> Iterator[WorkerGroup]:
    model = parallelize(gpt2(), workers=group)
    model.generate(**text_inputs(), max_new_tokens=2, do_sample=False)
    yield group
    model.deparallelize()


def processes(group: WorkerGroup) -> list[psutil.Process]:
    return [psutil.Process(), *(psutil.Process(pid) for pid in group.pids)]


def sockets(process: psutil.Process) -> list[str]:
    """Return the addresses at which a process listens or receives datagrams."""
    return [
        connection.laddr.ip
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM
    ]


def test_nothing_listens_beyond_loopback(group):
    listening = [address for process in processes(group) for address in sockets(process)]
    assert all(ipaddress.ip_address(address).is_loopback for address in listening)
    if group._processes.rendezvous is None:
        assert listening == _of_others


def test_control_sockets_have_no_name(group):
    assert all(
        connection.laddr in ("", None)
        for process in processes(group)[1:]
        for connection in process.net_connections("unix")
    )


def test_no_file_has_a_name(group):
    """Open files and mappings have no names, so none can be left behind or opened by others."""
    folders = (tempfile.gettempdir() + "/", "/dev/shm/", "/run/", "/var/tmp/")
    for process in processes(group)[1:]:
        links = [f"/proc/{process.pid}/fd/{fd}" for fd in os.listdir(f"/proc/{process.pid}/fd")]
        names = [os.readlink(link) for link in links]
        with open(f"/proc/{process.pid}/maps") as maps:
            names += [line.split(maxsplit=5)[5].strip() for line in maps if line.count(" /") == 1]
        # Standard output may be a file of the tests' user; the code and its environment may lie anywhere.
        code = (str(PACKAGE.parent), sys.prefix)
        ours = [name for name in names if name.startswith(folders) and not name.startswith(code)]
        assert [name for name in ours if name not in _standard_streams()] == []


def _standard_streams() -> set[str]:
    return {os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)}


def test_methods_that_are_not_public_are_refused(group):
    for name in ("_prepare", "__class__", "model", "no_such_method"):
        with pytest.raises((GroupError, TypeError, AttributeError)):
            group.call(name)
    assert group.alive


def read(data: bytes, fds: list[int]) -> None:
    """Receive the bytes of a frame, as the parent would, and decode its message."""
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    try:
        with ours:
            socket.send_fds(ours, [data], fds)
        channel.recv()
    finally:
        channel.close()


@pytest.mark.parametrize(
    ("offset", "form", "value"),
    [(16, "<Q", 1 << 20), (24, "<I", 1 << 30), (24, "<I", 2), (24, "<I", 0), (28, "<I", 250), (28, "<I", 0)],
)
def test_sizes_are_bounded_before_memory_is_set_aside(offset, form, value):
    """The bounded sizes are bytes, the number of objects outside the pickle, and the number of descriptors."""
    packed = pack(
        FrameKind.RESULT, 1, encode({"result": torch.ones(3)}) if form == "<Q" or offset == 24 else _with_file()
    )
    data = bytearray(packed.data)
    struct.pack_into(form, data, offset, value)
    before, files = psutil.Process().memory_info().vms, len(os.listdir("/proc/self/fd"))
    with pytest.raises((ProtocolError, NotPortableError, ChannelClosedError)):
        read(data, packed.fds)
    assert len(os.listdir("/proc/self/fd")) == files
    assert psutil.Process().memory_info().vms - before < 1 << 28


def _with_file() -> Encoded:
    return encode([FileDescriptor(0), torch.ones(3)])


@pytest.mark.parametrize("value", [-1, -2, 0, 1, 1 << 40, 1 << 62])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_sizes_within_a_message_are_checked(place, value):
    """The checked sizes are those of the pickle, of a tensor, and of a file."""
    packed = pack(FrameKind.RESULT, 1, encode([torch.ones(3), FileDescriptor(0)]))
    data = bytearray(packed.data)
    if struct.unpack_from("<q", data, FIXED_PART.size + 8 * place)[0] == value:
        return  # the right size
    struct.pack_into("<q", data, FIXED_PART.size + 8 * place, value)
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ProtocolError):
        read(data, packed.fds)
    assert len(os.listdir("/proc/self/fd")) == files


def test_tests_named_in_security_md_exist():
    """In SECURITY.md, `…` in the name of a test matches any letters."""
    words = re.findall(r"`([^`\n]+)`", (PACKAGE.parent / "SECURITY.md").read_text())
    tests = "\n".join(path.read_text() for path in (PACKAGE.parent / "tests").rglob("test_*.py"))
    for word in words:
        if "test_" in word or "…" in word:
            file, _, name = word.rpartition("::")
            assert any((PACKAGE.parent / "tests").rglob(file or "*")), word
            if not name.endswith(".py"):
                assert re.search(rf"def {re.escape(name).replace('…', '.*')}\(", tests), word


# The files in which bytes may become code, and why that is safe. A new one needs a reason here and in SECURITY.md.
PICKLES = {
    "wire/message.py",  # from a process and its own fork; between hosts, after its signature was checked
    "checkpoint/skeleton.py",  # inside such a message
    "hooks/pickling.py",  # inside such a message
    "generation/object_state.py",  # inside such a message
    "live_code/changes.py",  # inside such a message
    "autopolicy/live_edits.py",  # bytes that this process has just written, to copy a function of the program
    "collectives/shared_result.py",  # from another rank, through memory of this group alone
}


def _calls() -> Iterator[tuple[str, str, ast.Call]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                yield path.relative_to(PACKAGE).as_posix(), ast.unparse(node.func), node


def test_bytes_become_code_in_known_places_only():
    for place, name, call in _calls():
        assert name not in ("eval", "exec", "compile", "marshal.loads", "os.system"), (place, name)
        if name == "torch.load":
            only = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert only.get("weights_only") == "True", place
        if name.rpartition(".")[2] in ("Unpickler", "loads", "load") and "pickle" in name:
            assert place in PICKLES, (place, name)


def test_library_never_trusts_remote_code():
    """The caller's own choice may be passed on; a constant True would be the library's choice."""
    for place, name, call in _calls():
        for keyword in call.keywords:
            if keyword.arg == "trust_remote_code":
                assert not (isinstance(keyword.value, ast.Constant) and keyword.value.value), (place, name)


def test_workers_import_no_code_of_a_configuration(groups, tmp_path, monkeypatch):
    """With `auto_map` a checkpoint can bring its own code. The parent has not imported that code, so no worker imports
    it."""
    (tmp_path / "modeling_trap.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    model = gpt2()
    model.config.auto_map = {"AutoModelForCausalLM": "modeling_trap.Trap", "AutoConfig": "modeling_trap.Trap"}
    model.config._name_or_path = str(tmp_path)
    parallelize(model, workers=groups(2))
    model(**text_inputs())
    model.deparallelize()
    assert not (tmp_path / "sprung").exists()
