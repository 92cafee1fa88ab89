"""Commands that must be refused."""

import pytest

from gids.cli import main


@pytest.fixture
def refused(capsys):
    """Run a command that ends with status 2; what it prints to standard error."""

    def run(*words):
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        return capsys.readouterr().err

    return run
