"""One instance, and the GPUs that config.pbtxt names for its engine."""

from __future__ import annotations

import re

import pytest

from granikv.errors import InvalidArgument
from granikv.serving.placement import check_instances, visible_devices
from granikv.serving.settings import read_settings


@pytest.mark.parametrize(
    "groups",
    [None, [], [{"kind": "KIND_CPU", "count": 1}], [{"kind": "KIND_AUTO", "count": 1, "gpus": []}]],
    ids=str,
)
def test_one_instance_is_served(groups):
    check_instances({} if groups is None else {"instance_group": groups})


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([{"kind": "KIND_CPU", "count": 2}], ["count", "got 2", "tp", "replicas"]),
        ([{"kind": "KIND_CPU", "count": 1}] * 3, ["count", "got 3", "memory"]),
        ([{"kind": "KIND_GPU", "count": 1, "gpus": [1]}], ["kind", "KIND_GPU", "`devices`"]),
    ],
    ids=str,
)
def test_others_are_refused_with_reason_and_remedy(groups, words):
    with pytest.raises(InvalidArgument) as caught:
        check_instances({"instance_group": groups})
    assert all(word in str(caught.value) for word in ["instance_group", *words]), caught.value


@pytest.mark.parametrize(
    ("devices", "tp", "seen", "made"),
    [
        ("", 2, "", ""),
        ("3", 1, "", "3"),
        (" 2, 0", 2, "", "2,0"),
        ("1,0", 2, "4, 7,9", "7,4"),
        ("1", 1, "GPU-aa,GPU-bb", "GPU-bb"),
    ],
)
def test_gpus_are_those_that_the_engine_sees(devices, tp, seen, made):
    environ = {"CUDA_VISIBLE_DEVICES": seen, "GRANIKV_RUN_DIR": "x"}
    assert visible_devices(devices, {"tp": tp}, environ) == made
    parameters = {"devices": devices, "engine_config": f'{{"tp": {tp}}}'}
    assert read_settings(parameters, environ).devices == made


@pytest.mark.parametrize(
    ("devices", "fields", "seen", "words"),
    [
        ("0,1", {}, "", "1 of them, one for each rank (tp=1), got '0,1'"),
        ("0", {"tp": 2}, "", "2 of them"),
        ("0,0", {"tp": 2}, "", "different GPU numbers"),
        ("-1", {}, "", "GPU numbers"),
        ("cuda:0", {}, "", "GPU numbers"),
        ("0,", {"tp": 2}, "", "GPU numbers"),
        ("2", {}, "4,7", "numbers below 2: CUDA_VISIBLE_DEVICES is '4,7', got '2'"),
        ("0", {"device": "cpu"}, "", "device='cpu'"),
    ],
)
def test_wrong_gpus_are_refused(devices, fields, seen, words):
    with pytest.raises(InvalidArgument, match=f"devices: .*{re.escape(words)}"):
        visible_devices(devices, fields, {"CUDA_VISIBLE_DEVICES": seen})
