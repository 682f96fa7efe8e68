import pytest

from jaxppo.config import ConfigError, MeshConfig
from jaxppo.models import Architecture
from jaxppo.parallel.fits import check_fits
from jaxppo.parallel.mesh import make_mesh
from tests.tiny import HF_CONFIG


@pytest.mark.parametrize(
    ("mesh", "change", "row_length", "message"),
    [
        (
            MeshConfig(fsdp=4, context=2),
            {"hidden_size": 36, "head_dim": 8},
            16,
            "mesh.fsdp x mesh.context = 4 x 2 must divide 36, the hidden size of critic.path: valid is 1, 2, 3, 4, 6",
        ),
        (
            MeshConfig(fsdp=1, context=4, tensor=2),
            {},
            16,
            "mesh.context x mesh.tensor = 4 x 2 must divide 4, the number of attention heads of critic.path: "
            "valid is 1, 2, 4",
        ),
        (
            MeshConfig(tensor=4),
            {"intermediate_size": 62},
            16,
            "mesh.tensor = 4 must divide 62, the mlp width of critic.path: valid is 1, 2",
        ),
        (
            MeshConfig(tensor=4),
            {"vocab_size": 65},
            16,
            "mesh.tensor = 4 must divide 65, the vocabulary of critic.path: valid is 1, 5",
        ),
        (
            MeshConfig(context=2, tensor=2),
            {},
            18,
            "actor.row_length = 18: mesh.context x mesh.tensor = 2 x 2 must divide it, such as 20",
        ),
    ],
)
def test_what_does_not_divide_is_refused_in_one_line(mesh, change, row_length, message):
    network = Architecture.from_dict(HF_CONFIG | change)
    with pytest.raises(ConfigError) as error:
        check_fits(make_mesh(mesh), network, "critic.path", row_length)
    assert str(error.value) == message


def test_what_divides_passes_with_fewer_kv_heads_than_devices():
    check_fits(make_mesh(MeshConfig(context=2, tensor=2)), Architecture.from_dict(HF_CONFIG), "model.path", 20)
    check_fits(
        make_mesh(MeshConfig(fsdp=1, context=1, tensor=-1)),
        Architecture.from_dict(HF_CONFIG | {"num_attention_heads": 8}),
        "model.path",
        8,
    )
