"""``python -m gids``: the gids command."""

from gids.cli import main

raise SystemExit(main())
