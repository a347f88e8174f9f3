"""Signals during a sync: the first asks, a second Ctrl-C ends; handlers are given back."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from app.src.cli import interrupts
from app.src.cli.interrupts import interruptible, not_held_up, orderly


@pytest.mark.proves(2)
def test_the_first_signal_asks_and_the_second_ctrl_c_ends(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as interrupted:
        assert not interrupted()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted()
        assert interrupted.code == 130
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert "finishing the current batch" in capfd.readouterr().err


def test_a_second_sigterm_does_not_cut_the_batch_short() -> None:
    with interruptible() as interrupted:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupted.code == 143


def test_ctrl_c_leaves_the_outer_block_and_handlers_are_given_back() -> None:
    before, wakeup = signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    with pytest.raises(KeyboardInterrupt), not_held_up():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.set_wakeup_fd(wakeup) == wakeup
    assert all(thread.name != "signals" for thread in threading.enumerate())


def test_a_slow_clean_up_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what never begins is cut short."""
    cut_short: list[int] = []
    monkeypatch.setattr(interrupts, "GRACE", 0.8)
    monkeypatch.setattr(os, "_exit", cut_short.append)

    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            time.sleep(1.0)

    with pytest.raises(SystemExit) as caught, not_held_up(), orderly():
        work()
    assert caught.value.code == 143
    assert cut_short == []


def test_sigterm_leaves_an_orderly_block_through_its_finally() -> None:
    before = signal.getsignal(signal.SIGTERM)
    cleaned: list[bool] = []

    def work() -> None:
        with orderly():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                cleaned.append(True)

    with pytest.raises(SystemExit) as caught:
        work()
    assert cleaned == [True]
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
