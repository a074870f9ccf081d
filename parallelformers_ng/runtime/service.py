"""Runs a worker: joins the group, then receives requests, runs them and sends answers."""

from __future__ import annotations

import contextlib
import importlib
import logging
import operator
import os
import socket
import sys
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.collectives.connect import chosen_backend, connect
from parallelformers_ng.collectives.process_group import rendezvous_path
from parallelformers_ng.errors import GroupError, ProtocolError
from parallelformers_ng.runtime import failures, records, titles
from parallelformers_ng.runtime.placement import NCCL_PHASE, take_device
from parallelformers_ng.runtime.request import brief, described
from parallelformers_ng.wire import by_value
from parallelformers_ng.wire.frame import Flag, Frame, FrameKind
from parallelformers_ng.wire.message import NOTHING, decode, pack
from parallelformers_ng.wire.signed import Session, SignedChannel
from parallelformers_ng.wire.transport import SPIN_SECONDS, Channel

# Read these enum members once, because in Python 3.11 each access costs a function call.
_REQUEST, _DONE = FrameKind.REQUEST, FrameKind.DONE


class Emitter:
    """Sends values to the caller while a request runs. Only rank 0 sends; on other ranks a call has no effect.

    Attributes:
        sequence: number of the running request, the same number as in `Arena.request_cancel`.
        updates: received changes that other threads of the caller made to the arguments; see `has_update`.
    """

    def __init__(self, channel: Channel, rank: int, device: torch.device) -> None:
        self._channel = channel
        self._rank = rank
        self._device = device
        self.sequence = 0
        self.updates: list[Any] = []

    def __call__(self, value: Any) -> None:
        """Send one value to the caller's `on_event`; only the thread that runs the request may use the emitter."""
        if self._rank == 0:
            self._channel.send(FrameKind.EVENT, self.sequence, value, place="event")

    def has_update(self) -> bool:
        """Whether an update of the running request has arrived. Does not wait for one."""
        while self._channel.spin(0.0):
            frame = self._channel.receive()
            if frame.kind is not FrameKind.UPDATE:
                raise ProtocolError(f"rank {self._rank} received {frame.kind.name} while a request was running")
            self.updates.append(decode(frame, self._device if frame.flags & Flag.TO_DEVICE else None))
        return bool(self.updates)


@dataclass
class Service:
    """Runs the requests of the parent process on the target object, one after another."""

    channel: Channel
    target: Any
    communicator: Communicator
    emit: Emitter
    spins: bool  # whether to poll for a request before sleeping, which needs a spare CPU
    device: torch.device

    def serve(self) -> None:
        """Serve requests until the parent ends the worker.

        Exceptions of a request are sent to the caller, and abort the collectives unless all ranks have ended the
        request.
        """
        while frame := self._next():
            if frame.flags & Flag.RESET:
                self.communicator.reset()  # if this fails, the process ends; its peers would otherwise wait
            try:
                value = self._run(**decode(frame, self.device if frame.flags & Flag.TO_DEVICE else None))
                if abort_error := self.communicator.why_void():
                    raise abort_error
                self.communicator.note_end(frame.sequence)
                if value is not None and (self.communicator.rank == 0 or frame.flags & Flag.EACH):
                    self.channel.send(FrameKind.RESULT, frame.sequence, value, place="result")
                else:
                    self.channel.send_packed(pack(_DONE, frame.sequence, NOTHING))
            except BaseException as error:  # the caller gets each exception, also SystemExit
                is_consequence = self.communicator.why_void() is not None
                if not self.communicator.all_ended(frame.sequence):
                    self.communicator.abort(f"rank {self.communicator.rank} raised {type(error).__name__}")
                self.channel.send(FrameKind.ERROR, frame.sequence, failures.describe(error, is_consequence))
            if self.communicator.why_void():  # after `except`, because the caught error keeps device memory in use
                self.communicator.clear_up()

    def _next(self) -> Frame | None:
        if self.spins:  # the caller often sends the next request soon after an answer
            self.channel.spin(time.monotonic() + SPIN_SECONDS)
        frame, due = self.channel.receive(), self.emit.sequence + 1
        self.emit.updates = []
        while frame.kind is FrameKind.UPDATE:  # skip updates that came after their request had ended
            frame.discard()
            frame = self.channel.receive()
        if frame.kind is _REQUEST and frame.sequence == due:
            self.emit.sequence = due
            return frame
        if frame.kind is FrameKind.GOODBYE:
            return None
        where = f"rank {self.communicator.rank}"
        raise ProtocolError(f"{where} received {frame.kind.name} {frame.sequence}; expected request {due}")

    def _run(self, method: str, args: Any, kwargs: Any) -> Any:
        if "._" in f".{method}":
            raise GroupError(f"the method {method!r} is private to the worker; call a public one")
        return operator.attrgetter(method)(self.target)(*args, **kwargs)


def start(channel: Channel, boot: dict[str, Any]) -> Service | None:
    """Join the group, build the target and return its `Service`. After an error, send it to the parent and return None.

    The function sets `sys.path`, the environment variables, the CPUs and the thread counts of this process. After a
    successful start, standard error is the parent's, and ranks other than rank 0 show no warnings.
    """
    by_value.in_rank = True
    try:
        sys.path[:] = boot["path"]
        os.environ.clear()
        os.environ.update(boot["environment"])
        if boot["cpus"]:
            with contextlib.suppress(OSError):  # a sandbox may forbid pinning
                os.sched_setaffinity(0, boot["cpus"])  # later threads of this process inherit the CPUs
        torch.set_num_threads(boot["threads"])
        threadpool_limits(boot["threads"])  # numpy's libraries read their environment variables only at import
        channel.send(FrameKind.EVENT, 0, f"importing {boot['target']}")
        module, _, name = boot["target"].partition(":")
        cls = getattr(importlib.import_module(module), name)

        span = boot["span"]  # a group on one host has no span
        counts, number = (span["counts"], span["number"]) if span else ([boot["world_size"]], 0)
        rank, world_size, device = sum(counts[:number]) + boot["rank"], sum(counts), torch.device(boot["device"])
        records.send_records(rank, socket.socket(fileno=boot["records"].fd))
        if device.type == "cuda":
            channel.send(FrameKind.EVENT, 0, f"preparing {device}")
            take_device(device)
        uses_nccl = chosen_backend(boot["backend"], device.type) == "nccl" and world_size > 1
        channel.send(FrameKind.EVENT, 0, NCCL_PHASE if uses_nccl else "connecting to its peers")
        rendezvous = boot["rendezvous"]  # kept open: ranks connect through it again after a reset
        path = rendezvous and rendezvous_path(rendezvous.fd)
        plain = {name: boot[name] for name in ("backend", "rank", "world_size", "timeout", "span")}
        communicator = connect(**plain, device=device, arena_fd=boot["arena"].fd, rendezvous=path)
        boot["arena"].close()
        if records.are_detailed():
            _log_details(type(communicator))

        channel.send(FrameKind.EVENT, 0, f"building {name}")
        caller = channel
        if span:
            file, *keys = span["caller"]
            caller = SignedChannel(socket.socket(fileno=file.fd), Session(*keys), blocking=True)
        titles.show(f"rank {rank} of {world_size}")
        emit = Emitter(caller, rank, device)
        target = cls(rank, world_size, device, communicator, emit)
    except Exception as error:  # every error is sent to the caller
        channel.send(FrameKind.ERROR, 0, failures.describe(error))
        return None

    if rank:
        # All ranks run the same code on the same values, so only rank 0 prints and shows warnings. Every rank reports
        # errors.
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    elif hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # a `print` of a model must appear at once
    # Until now, standard error was the log that a StartupError quotes. From now on it is the parent's standard error.
    sys.stderr.flush()
    os.dup2(boot["stderr"].fd, 2)
    boot["stderr"].close()
    channel.send(FrameKind.READY, 0, None)
    return Service(caller, target, communicator, emit, boot["spins"], device)


def _log_details(communicator: type[Communicator]) -> None:
    def request(service: Service, method: str, args: Any, kwargs: Any) -> str:
        return f"request {service.emit.sequence}, {described(method, args, kwargs)}"

    records.log_calls(Service, "_run", request)
    for name in ("sum", "gather"):
        records.log_calls(communicator, name, lambda _, tensor, *rest, name=name: f"{name} of {brief(tensor)}")
