"""Datasets, graphs and threads for the DGL tests."""

import dgl_model
import pytest
import torch

import dgl  # isort: skip  (importable once gids.dgl is)


@pytest.fixture(autouse=True)
def one_thread():
    """Stock DGL repeats itself only with one OpenMP thread."""
    threads = torch.get_num_threads(), dgl.utils.get_num_threads()
    torch.set_num_threads(1)
    dgl.utils.set_num_threads(1)
    yield
    torch.set_num_threads(threads[0])
    dgl.utils.set_num_threads(threads[1])


@pytest.fixture(scope="session")
def homogeneous(tmp_path_factory):
    return dgl_model.homogeneous(tmp_path_factory.mktemp("homogeneous"))


@pytest.fixture(scope="session")
def heterogeneous(tmp_path_factory):
    return dgl_model.heterogeneous(tmp_path_factory.mktemp("heterogeneous"))


@pytest.fixture
def dataset(request):
    """Indirect: the dataset named by the parameter."""
    return request.getfixturevalue(request.param)
