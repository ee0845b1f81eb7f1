"""Command line: ``python -m drl_family_sd3.glyphs build DIRECTORY``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .build import build
from .vae import STEPS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m drl_family_sd3.glyphs")
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser(
        "build", help="write the base pipeline with an untrained transformer"
    )
    make.add_argument("directory", help="where the diffusers pipeline goes")
    make.add_argument("--seed", type=int, default=0, help="same seed, same bytes (default 0)")
    make.add_argument("--vae-steps", type=int, default=STEPS, help=f"default {STEPS}")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that ``arguments`` (default: those of the process) name."""
    options = _parser().parse_args(arguments)
    build(
        options.directory,
        seed=options.seed,
        vae_steps=options.vae_steps,
        say=lambda line: print(line, flush=True),
    )


if __name__ == "__main__":
    main()
