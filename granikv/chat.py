"""A conversation in the terminal: through a running server, or with the model in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from granikv.errors import Unavailable, check_host_port
from granikv.text import Tokenizer, load_tokenizer

Answer = Callable[[str, int, Callable[[str], None]], str]  # prompt, max_tokens, on_piece -> text


class Chat:
    """Turns so far, in the model's own chat format. answer: greedy text for a prompt."""

    def __init__(self, tokenizer: Tokenizer, answer: Answer, system: str | None = None):
        self.tokenizer, self.answer = tokenizer, answer
        # without a system message the model's template puts its own
        self.messages = [{"role": "system", "content": system}] if system else []

    def prompt(self) -> str:
        return self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True)

    def ask(self, line: str, max_tokens: int, on_piece: Callable[[str], None]) -> str:
        """Raises Unavailable or what the engine raises; the turn is then forgotten."""
        self.messages.append({"role": "user", "content": line})
        try:
            text = self.answer(self.prompt(), max_tokens, on_piece)
        except BaseException:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": text})
        return text


def server_answer(url: str) -> Answer:
    from granikv.demo.runner import stream

    def answer(prompt: str, max_tokens: int, on_piece: Callable[[str], None]) -> str:
        response = stream(url, prompt, max_tokens, on_piece)
        if response.error:
            raise Unavailable(f"{url}: {response.error}")
        return response.text

    return answer


def is_served(url: str, timeout_s: float = 2.0) -> bool:
    """Whether a server with a ready model is at url (host:port of gRPC)."""
    try:
        import tritonclient.grpc as triton
    except ImportError:
        return False
    from granikv.demo.runner import MODEL

    client = triton.InferenceServerClient(url)
    try:
        return bool(client.is_model_ready(MODEL, client_timeout=timeout_s))
    except triton.InferenceServerException:
        return False
    finally:
        client.close()


@contextmanager
def local_answer(model: str | Path | None) -> Iterator[Answer]:
    """The model in this process; nothing is listened on."""
    from granikv.config import EngineConfig
    from granikv.engine import Engine
    from granikv.sampling_params import SamplingParams

    engine = Engine(EngineConfig(model=model, capacity_tokens=16384))
    num_requests = 0

    def answer(prompt: str, max_tokens: int, on_piece: Callable[[str], None]) -> str:
        nonlocal num_requests
        num_requests += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        engine.add_request(f"chat-{num_requests}", prompt, params)
        text = ""
        try:
            while engine.has_work():
                for output in engine.step():
                    if output.error is not None:
                        raise output.error
                    text += output.text
                    on_piece(output.text)
        except KeyboardInterrupt:
            engine.abort(f"chat-{num_requests}")
            while engine.has_work():
                engine.step()
        return text

    try:
        yield answer
    finally:
        engine.close()


def talk(chat: Chat, lines: Iterable[str], max_tokens: int) -> None:
    """Answer every line on stdout. A line that only holds spaces is skipped."""

    def show(piece: str) -> None:
        print(piece, end="", flush=True)

    for line in lines:
        if line.strip():
            chat.ask(line.strip(), max_tokens, show)
            print(flush=True)


def typed_lines() -> Iterator[str]:
    """Lines of a terminal until an empty one, Ctrl-D or Ctrl-C."""
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line.strip():
            return
        yield line


def run_chat(
    url: str | None, model: str | Path | None, system: str | None, max_tokens: int, default_url: str
) -> None:
    """url: a server's gRPC address; None: the default one if it is there, else this process.

    Raises InvalidArgument, Unavailable, ModelFileError or Unsupported (a model without template).
    """
    if url is not None:
        check_host_port("--url", url, "of a server's gRPC (8001 by default)")
    is_typed = sys.stdin.isatty()
    lines: Iterable[str] = typed_lines() if is_typed else sys.stdin
    tokenizer = load_tokenizer(model)
    if url is None and is_served(default_url):
        url = default_url
    if url is not None:
        if not is_served(url):
            raise Unavailable(f"{url}: no server with a ready model; `granikv serve` starts one")
        talk(Chat(tokenizer, server_answer(url), system), lines, max_tokens)
        return
    print(f"no server at {default_url}: the model runs in this process", file=sys.stderr)
    with local_answer(model) as answer:
        talk(Chat(tokenizer, answer, system), lines, max_tokens)
