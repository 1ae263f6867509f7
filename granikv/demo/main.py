"""The demo from start to verdict: two runs, the comparison, the report."""

from __future__ import annotations

import fcntl
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from granikv.demo.reference import (
    NEAR_TIE,
    Difference,
    Reference,
    import_torch_with_sleeping_threads,
    load_reference,
)
from granikv.demo.report import print_table, write_report
from granikv.demo.runner import LAYOUTS, Response, RunResult, run_layout
from granikv.demo.workload import AGENTS, MAX_ROUNDS
from granikv.errors import Unavailable
from granikv.outputs import check_output_folder

NEAR_TIE_LIMIT = 0.02  # of the responses compared


def compare(runs: list[RunResult], get_reference: Callable[[], Reference]) -> list[Difference]:
    """Differences between both runs. A conversation is compared up to its first difference:
    from there on its prompts differ."""
    differences: list[Difference] = []
    parted: set[str] = set()
    for ours, other in zip(runs[0].responses, runs[1].responses, strict=True):
        if ours.error or other.error or ours.agent in parted or ours.text == other.text:
            continue
        parted.add(ours.agent)
        differences.append(judge(ours, other.text, get_reference()))
    return differences


def judge(ours: Response, expected: str, reference: Reference) -> Difference:
    gap = reference.relative_gap(ours.prompt, ours.text, expected)
    return Difference(
        ours.agent, ours.round_index, ours.text, expected, near_tie=gap < NEAR_TIE, logit_gap=gap
    )


def compare_with_transformers(
    run: RunResult, reference: Reference, console: Console
) -> list[Difference]:
    limits = {agent.name: agent.max_tokens for agent in AGENTS}
    answered = [response for response in run.responses if not response.error]
    differences = []
    for number, response in enumerate(answered, 1):
        ids = reference.greedy(response.prompt, limits[response.agent], draft=response.text)
        expected = reference.decode(ids)
        if response.text.strip() != expected.strip():
            differences.append(judge(response, expected, reference))
        console.print(f"transformers: {number}/{len(answered)} answers checked")
    return differences


@contextmanager
def only_demo_in(folder: Path) -> Iterator[None]:
    """Raises Unavailable while another demo writes to the folder; that one's end frees it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(
                f"{folder}: another demo writes its report there; wait for it, or name another --out"
            ) from None
        yield


def run_demo(short: bool, folder: Path, console: Console | None = None) -> int:
    """0 when every response arrived and the answers matched, else 1. Raises InvalidArgument when
    the report could not be written to `folder`, Unavailable when another demo writes there, and
    what starting a server raises."""
    check_output_folder("--out", folder)
    with only_demo_in(folder):
        return _run_demo(short, folder, console or Console())


def _run_demo(short: bool, folder: Path, console: Console) -> int:
    import_torch_with_sleeping_threads()
    num_agents, num_rounds = (4, 1) if short else (len(AGENTS), MAX_ROUNDS)
    console.print(f"{num_agents} agents that share a handbook, {num_rounds} round(s)")
    runs = [run_layout(layout, num_agents, num_rounds, console, folder) for layout in LAYOUTS]

    @functools.cache
    def get_reference() -> Reference:
        from granikv.models.embedded import find_embedded

        console.print("transformers: loading the same model as the reference")
        return load_reference(find_embedded())

    failed = [r for run in runs for r in run.responses if r.error]
    differences = compare(runs, get_reference)
    num_compared = len(runs[0].responses)
    if short:
        differences += compare_with_transformers(runs[0], get_reference(), console)
        num_compared += len(runs[0].responses)
    wrong = [d for d in differences if not d.near_tie]
    num_ties = len(differences) - len(wrong)
    matched = not wrong and num_ties <= NEAR_TIE_LIMIT * num_compared
    verdict = {
        "responses": sum(len(run.responses) for run in runs),
        "failed": len(failed),
        "answers compared": num_compared,
        "reference": "transformers" if short else "the other layout",
        "near-ties": num_ties,
        "different": len(wrong),
        "passed": matched and not failed,
    }
    print_table(runs, console)
    if short:
        console.print(
            "The short demo checks answers; too small to compare speed: `make demo` does."
        )
    for response in failed:
        console.print(f"{response.agent}, round {response.round_index + 1}: {response.error}")
    for d in differences:
        kind = "near-tie" if d.near_tie else "different"
        console.print(
            f"{d.agent}, round {d.round_index + 1}: {kind} (logit gap {d.logit_gap:.2e} of the"
            f" range)\n  got      {d.got!r}\n  expected {d.expected!r}",
            markup=False,
        )
    write_report(folder, runs, differences, verdict)
    console.print(", ".join(f"{name}: {value}" for name, value in verdict.items()))
    console.print(f"Report: {folder / 'report.html'}")
    return 0 if verdict["passed"] else 1
