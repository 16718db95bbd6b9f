# CASE nproc=3 kind=extra|mismatch ranks=0 line=@HERE
"""A checkpoint whose state is gathered from all ranks, asked for by the main rank only. In several files."""

from engine.loop import Loop
from engine.setup import start


def main():
    config = start(every=4)
    Loop(config).run(12)


if __name__ == "__main__":
    main()
