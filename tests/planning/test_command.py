"""Mistakes on the plan's command line are one line each, before anything is compiled."""

import pytest

from jaxppo.config import MeshConfig, UserError
from jaxppo.plan import main, num_devices, own_flags
from jaxppo.planning.rates import RATES, collective_seconds, crosses_nodes


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--devices"], "--devices: a value is missing"),
        (["--length-share", "1.5"], "valid is a number above 0"),
        (["--length-share=x"], "valid is a number"),
        (["--devices", "x"], "valid is a number of devices"),
        ([], "mesh.fsdp = -1: give its size, or --devices N"),
    ],
)
def test_a_mistake_is_one_line(flags, says, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(SystemExit) as exit:
        main(["--config", "configs/quickstart.py", *flags])
    error = capsys.readouterr().err
    assert exit.value.code == 2
    assert says in error
    assert error.count("\n") == 1


def test_own_flags_leave_the_others():
    assert own_flags(["--device", "b200", "--mesh.fsdp", "8"])[1] == ["--mesh.fsdp", "8"]


def test_devices_are_the_axes_product():
    assert num_devices(MeshConfig(fsdp=8, tensor=4), "") == 32
    with pytest.raises(UserError):
        num_devices(MeshConfig(), "0")


def test_groups_beyond_a_node_use_the_network():
    sizes = {"data": 1, "fsdp": 8, "context": 1, "tensor": 4}
    assert crosses_nodes(("fsdp",), sizes)
    assert not crosses_nodes(("tensor",), sizes)
    sent = {("all-gather", ("fsdp",)): 37.5e9, ("all-gather", ("tensor",)): 337.5e9}
    assert collective_seconds(sent, sizes, RATES["h200"]) == pytest.approx(2.0)
