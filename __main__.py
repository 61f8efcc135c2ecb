"""``python -m tilescout``: the command line."""

from __future__ import annotations

from tilescout.tuner.cli import main

if __name__ == "__main__":
    main()
