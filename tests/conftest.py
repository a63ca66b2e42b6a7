import pytest
import torch

torch.set_num_threads(1)  # the models here are tiny: more threads only wait for each other


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
