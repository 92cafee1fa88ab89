"""gids.distributed.open: a dataset whose rows, and perhaps edges, are divided among ranks. The user's entry.

Loaders take a GroupSource like any other Source. It replaces what they sample by and what they read by.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist

from gids.distributed.features import GroupFeatures
from gids.distributed.group import Group
from gids.distributed.owners import GivenOwners, HashOwners, Owners, RangeOwners
from gids.distributed.sampling import GroupSampling, whole_topology
from gids.errors import FormatError
from gids.loader import source as loader_source
from gids.loader.ranks import Ranks
from gids.loader.source import Source
from gids.loader.tables import Tables, chosen_tables
from gids.sampler import Minibatch, Sampler, Topology
from gids.sampler.forest import AnySeeds
from gids.store import FeatureStore, Graph, Table, graphs_of
