"""``python -m instep``: the command, where no console script is on the path."""

from instep.cli import main

main()
