"""Requests that once ended the server, or kept everybody waiting. Real Triton, the fake engine."""

from __future__ import annotations

import resource
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from granikv.serving import tritonserver
from granikv.serving.engine_client import STACK_BYTES as ENGINE_STACK_BYTES
from tests.serving.http_text import post


def soft_stack_limit(pid: int) -> int:
    (line,) = (x for x in Path(f"/proc/{pid}/limits").read_text().splitlines() if "stack" in x)
    return int(line.split()[3])


@pytest.mark.parametrize("kind", ["a long text", "a long key", "nested brackets"])
def test_a_large_http_body_does_not_end_the_server(server, kind):
    """With the usual stack of 8 MB each of them did."""
    long = b"a" * 9_000_000
    body = {
        "a long text": b'{"text_input":"%s","max_tokens":0}' % long,
        "a long key": b'{"text_input":"a","max_tokens":0,"%s":1}' % long,
        "nested brackets": b'{"text_input":' + b"[" * 200_000,
    }[kind]
    status, text = post(f"{server.address.http_url}/v2/models/granikv/generate", body)
    assert status >= 400, text
    assert server.probe() and server.num_starts == 1


def test_the_servers_stack_is_its_own(server):
    if resource.getrlimit(resource.RLIMIT_STACK)[1] != resource.RLIM_INFINITY:
        pytest.skip("the hard limit decides here")
    assert soft_stack_limit(server.pids["server"]) == tritonserver.STACK_BYTES
    assert soft_stack_limit(server.pids["engine"]) == ENGINE_STACK_BYTES


def test_a_hard_limit_that_is_too_low_is_told(monkeypatch, capsys):
    monkeypatch.setattr("resource.getrlimit", lambda _: (8 << 20, 8 << 20))
    tritonserver.check_stack()
    text = capsys.readouterr().err
    assert "warning" in text and "8192 KiB" in text and "ulimit -Hs" in text
    monkeypatch.setattr("resource.getrlimit", lambda _: (8 << 20, resource.RLIM_INFINITY))
    tritonserver.check_stack()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["id", "cache_salt", "prefix_id"])
@pytest.mark.parametrize("value", [b"n" * 1_000_000, b"\xff\xfe"], ids=["long", "no UTF-8"])
def test_a_bad_name_is_refused_in_few_words(server, name, value):
    body = b'{"%s":"%s","text_input":"a","max_tokens":1}' % (name.encode(), value)
    request = urllib.request.Request(f"{server.address.http_url}/v2/models/granikv/generate", body)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    text = refused.value.read().decode(errors="replace")
    assert f"INVALID_ARG: {name}: expected" in text and len(text) < 300
