"""``python -m kvkeep``: the same as the ``kvkeep`` command."""

from .cli import main

main()
