"""The host numbers of launch_dims stand in one order: the executor's table's and the C++ enum's."""

import re
from pathlib import Path

from granikv.engines.io import LAUNCH_DIMS

HEADER = Path(__file__).resolve().parents[2] / "trtllm_plugin" / "src" / "plugin_io.h"


def snake(name: str) -> str:
    return re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()


def test_the_enum_is_the_tables_order():
    text = HEADER.read_text()
    (body,) = re.findall(r"enum LaunchDim : int32_t \{(.*?)\};", text, re.DOTALL)
    names = [snake(name) for name in re.findall(r"^\s*k(\w+),", body, re.MULTILINE)]
    expected = ["zero", *(str(dim).removesuffix("_index") for dim in LAUNCH_DIMS[1:])]
    assert names == expected and "=" not in re.sub(r"//.*", "", body)
    (shape,) = re.findall(r'"launch_dims",\s*"\[0, (.*?)\]"', text)
    assert [dim.replace(" ", "_") for dim in shape.split(", ")] == expected[1:]
