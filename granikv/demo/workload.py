"""The demo's workload: sixteen agents that share a handbook, tasks of varied lengths, three rounds.

Tool results are scripted, so both runs see the same text as long as the answers are equal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import resources

MAX_ROUNDS = 3


@dataclass(frozen=True)
class AgentTask:
    name: str
    task: str
    tool_results: tuple[str, str]  # given at the start of rounds 2 and 3
    max_tokens: int


@dataclass
class Conversation:
    """What one agent has seen and said."""

    agent: AgentTask
    system: str
    turns: list[tuple[str, str]] = field(default_factory=list)  # (role, text)

    def prompt(self) -> str:
        """The conversation in the embedded model's chat format, open for the answer."""
        parts = [("system", self.system), *self.turns]
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in parts)
        return f"{text}<|im_start|>assistant\n"

    def ask(self, round_index: int) -> str:
        """Add the user's turn of a round and return the whole prompt."""
        if round_index == 0:
            text = self.agent.task
        else:
            text = f"Tool result: {self.agent.tool_results[round_index - 1]}\nContinue your task."
        self.turns.append(("user", text))
        return self.prompt()

    def answer(self, text: str) -> None:
        self.turns.append(("assistant", text))


def system_prompt() -> str:
    return resources.files("granikv.demo").joinpath("system_prompt.txt").read_text("utf-8").strip()


def shared_prefix() -> str:
    """The text that every prompt of the workload begins with."""
    return f"<|im_start|>system\n{system_prompt()}<|im_end|>\n<|im_start|>user\n"


def conversations(num_agents: int) -> list[Conversation]:
    system = system_prompt()
    return [Conversation(agent, system) for agent in AGENTS[:num_agents]]


_ALARM = (
    "Watch reports three alarms at once. The shop's error rate is 4.1 percent since 09:12, its"
    " release 8.3 went live at 08:55. Crossing CD207 is 35 minutes late because a truck blocked the"
    " ramp at Castle Quay. A partner writes that 14 of its customers paid twice this morning. Split"
    " this into tasks for the team, in the order of importance, with the reason for the order."
)
_NOTE = (
    "Write the message to passengers of DF311. Facts: Dunmarrow to Ferrow, departure 16:20, the tide"
    " window at Ferrow closes at 18:05, the ship left Aldermouth 50 minutes late because of fog, a"
    " new departure at 17:05 is possible and 22 passengers have a connection to FB118 at 19:40 that"
    " will wait for them. The next message comes at 16:50. Keep to section 9."
)

AGENTS = (
    AgentTask(
        "coordinator",
        _ALARM,
        (
            "service_health(shop): error rate 4.4 percent, latency 900 ms, version 8.3.",
            "rollback(shop, 8.2): done at 09:31, error rate 0.3 percent.",
        ),
        40,
    ),
    AgentTask(
        "watch",
        "Which crossings are late by more than 15 minutes now?",
        (
            "list_crossings(Castle Quay, today): CD207 35 minutes late, CE208 on time.",
            "crossing_status(CD207): left at 10:02, 41 minutes late, ship Marram.",
        ),
        24,
    ),
    AgentTask(
        "bookings",
        "Booking HQ7K2 wants a refund of 95 crowns for each of 2 passengers. May you do it?",
        (
            "find_booking(HQ7K2): AB104, flexible fare, 1 car, no change so far.",
            "The coordinator agreed to 95 crowns for each passenger.",
        ),
        28,
    ),
    AgentTask(
        "communications",
        _NOTE,
        (
            "notify(passengers of DF311): sent to 214 passengers.",
            "crossing_status(DF311): left at 17:07.",
        ),
        40,
    ),
    AgentTask(
        "scheduler",
        "Can EF402 leave 20 minutes later? Name the checks.",
        (
            "tide_window(Ferrow, today): 11:40 to 18:05.",
            "crew_hours(Sandwort): worked 8.5 hours, 3.5 remain.",
        ),
        28,
    ),
    AgentTask(
        "cargo",
        "Lane 3 of BC115 has 71 tonnes. A truck of 22 tonnes waits. What do you do, and why?",
        (
            "lane_plan(BC115): lane 3 71 tonnes, lane 4 48 tonnes, no dangerous goods.",
            "assign_lane(BC115, truck, 4): done.",
        ),
        28,
    ),
    AgentTask(
        "payments",
        "A passenger says that booking TR9QD was charged twice.",
        (
            "payment_trace(TR9QD): two captures of 148 crowns, 09:02 and 09:03, both confirmed.",
            "refund(TR9QD, 148, doubled payment): done at 10:20.",
        ),
        24,
    ),
    AgentTask(
        "engineering",
        "The timetable service fails since its certificate ended at 00:00. What is the first remedy,"
        " what stays usable meanwhile, and what do you need from the coordinator?",
        (
            "service_health(timetable): error rate 100 percent, version 3.9.",
            "A new certificate is installed, error rate 0 percent since 07:44.",
        ),
        36,
    ),
    AgentTask(
        "records",
        "Log: shop rolled back at 09:31.",
        ("log_entry: saved as entry 12.", "log_entry: saved as entry 13."),
        16,
    ),
    AgentTask(
        "bookings-2",
        "Move booking LM3PA from AB106 to AB108, which leaves in 12 minutes.",
        ("move_booking: AB108 is full.", "list_crossings(Aldermouth, today): AB110 has 31 seats."),
        24,
    ),
    AgentTask(
        "cargo-2",
        "A truck with acid and a truck with fuel booked FA501. Plan their lanes.",
        (
            "lane_plan(FA501): lanes 1 to 6, lane 1 full, the rest empty.",
            "assign_lane(FA501, acid, 2): done; assign_lane(FA501, fuel, 5): done.",
        ),
        32,
    ),
    AgentTask(
        "watch-2",
        "The counter service answers in 1,350 ms for six minutes. Healthy?",
        (
            "service_health(counter): error rate 0.8 percent, latency 1,380 ms.",
            "The disk of the counter service was full and is now cleared.",
        ),
        24,
    ),
    AgentTask(
        "communications-2",
        "Tell the harbour authority of Brenn that AB104 arrives 25 minutes late on the Marram.",
        ("notify(harbour authority of Brenn): sent.", "AB104 arrived at 11:55."),
        32,
    ),
    AgentTask(
        "scheduler-2",
        "The crew of the Thrift has worked 11 hours; its next crossing takes 95 minutes. Decide.",
        (
            "crew_hours(Thrift): worked 11.1 hours, 0.9 remain.",
            "The crew of the Sedge is free from 15:30 and has 9 hours left.",
        ),
        32,
    ),
    AgentTask(
        "payments-2",
        "The bank declines one card in five since 08:40. Where do you look first?",
        (
            "service_health(payments): error rate 19 percent, version 5.1, released 08:35.",
            "payments is drained; the rollback to 5.0 is finished.",
        ),
        28,
    ),
    AgentTask(
        "engineering-2",
        "Write the first three lines of the report about the shop's fault.",
        (
            "The fault began at 09:12 and ended at 09:31; 212 orders failed.",
            "The cause was a missing index in release 8.3.",
        ),
        36,
    ),
)
