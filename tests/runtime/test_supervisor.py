"""Tests that a supervisor that gives up says why the last group could not be started."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from parallelformers_ng.errors import GroupError, RestartLimitError
from parallelformers_ng.runtime.supervisor import Supervisor


class EndedGroup:
    """A group whose workers have died."""

    alive = False

    def check_process(self) -> None: ...

    def close(self) -> None: ...

    def deadline(self) -> float:
        return threading.TIMEOUT_MAX

    def error(self) -> GroupError:
        return GroupError("a worker died")

    def wait_until_over(self) -> None: ...


def reason_of_giving_up(error: Exception) -> str:
    def revive() -> Any:
        raise error

    group: Any = EndedGroup()
    supervisor = Supervisor(group)
    supervisor.supervise(revive, max_restarts=1, restart_window=60)
    with pytest.raises(RestartLimitError) as caught:
        supervisor.ready()
    supervisor.close()
    return str(caught.value)


def test_failed_start_is_the_reason() -> None:
    reason = reason_of_giving_up(MemoryError("no memory for 7 bytes"))
    assert "the last of 1 restarts within 60 s" in reason
    assert "failed with: no memory for 7 bytes; model.deparallelize()" in reason


def test_deleted_archives_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / "code.zip"))
    reason = reason_of_giving_up(ModuleNotFoundError("No module named 'mine'"))
    assert f"No module named 'mine' (sys.path names {tmp_path}/code.zip, which is gone)" in reason
