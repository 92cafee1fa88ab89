"""Datasets, graphs and threads for the DGL tests."""

import dgl_model
import pytest

import dgl  # isort: skip  (importable once gids.dgl is)


@pytest.fixture(autouse=True)
def _one_thread_of_dgl(one_thread):
    """Stock DGL repeats itself only with one OpenMP thread."""
    threads = dgl.utils.get_num_threads()
    dgl.utils.set_num_threads(1)
    yield
    dgl.utils.set_num_threads(threads)


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
