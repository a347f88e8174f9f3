"""Signals during a sync: the first asks, a second Ctrl-C ends; handlers are given back."""

from __future__ import annotations

import os
import signal

import pytest

from app.src.cli.interrupts import interruptible, orderly


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
    assert "finishing the batch" in capfd.readouterr().err


def test_a_second_sigterm_does_not_cut_the_batch_short() -> None:
    with interruptible() as interrupted:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupted.code == 143


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
