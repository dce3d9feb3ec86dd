"""Writes small random checkpoints, of a few megabytes each, in the layouts that people download.

    python -m tools.checkpoints --list
    python -m tools.checkpoints mistral3 /tmp/mistral3 [--seed 1]
    python -m tools.checkpoints --all /tmp/checkpoints

Their weights are noise and so are their answers; names, configurations and tokenizers are like those of the real ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.checkpoints.catalogue import LAYOUTS


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.checkpoints",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s (--list | LAYOUT OUT | --all OUT) [--seed SEED]",
    )
    parser.add_argument("arguments", nargs="*", metavar="LAYOUT OUT", help="what to write, and the folder for it")
    parser.add_argument("--list", action="store_true", help="say which layouts there are")
    parser.add_argument("--all", action="store_true", help="write every layout into a folder of its name below OUT")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    options = parser.parse_args()
    if options.list:
        for name, entry in LAYOUTS.items():
            print(f"{name:26s}{entry.about}")
        return
    if len(options.arguments) != (1 if options.all else 2):
        parser.error("give a layout and a folder, or --all and a folder, or --list")
    *names, out = options.arguments
    for name in LAYOUTS if options.all else names:
        if name not in LAYOUTS:
            parser.error(f"no layout {name!r}; there are: {', '.join(LAYOUTS)}")
        folder = LAYOUTS[name].write(Path(out) / name if options.all else Path(out), seed=options.seed)
        size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        print(f"{folder}: {LAYOUTS[name].about} ({size:.1f} MB)")


if __name__ == "__main__":
    main()
