"""``python -m kvtier.cli``."""

from kvtier.cli import main

main(prog_name="kvtier")
