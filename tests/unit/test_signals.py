"""SIGTERM unwinds, so that what a command started is stopped."""

import os
import signal

import pytest

from granikv.serving.signals import sigterm_unwinds


@pytest.fixture
def sigterm():
    """Sets a handler for this test; a server of the session may have its own, which comes back."""
    before = signal.getsignal(signal.SIGTERM)
    yield lambda handler: signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGTERM, before)


def test_sigterm_runs_finally_blocks_and_the_default_comes_back(sigterm):
    sigterm(signal.SIG_DFL)
    cleaned = []
    with pytest.raises(SystemExit) as stopped, sigterm_unwinds():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            cleaned.append(True)
    assert cleaned == [True] and stopped.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_another_handler_is_left_alone(sigterm):
    seen = []
    sigterm(lambda *args: seen.append(args[0]))
    with sigterm_unwinds():
        os.kill(os.getpid(), signal.SIGTERM)
    assert seen == [signal.SIGTERM]
