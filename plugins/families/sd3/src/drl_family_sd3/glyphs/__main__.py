"""Command line of the glyph model: ``python -m drl_family_sd3.glyphs build|pack|prompts``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .build import build
from .pack import pack, write_prompts
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
    ship = commands.add_parser("pack", help="put trained weights into a built pipeline, in float16")
    ship.add_argument("pipeline", help="directory that build wrote")
    ship.add_argument("weights", help="model/transformer.safetensors of the supervised run")
    ship.add_argument("target", help="where the packed pipeline goes")
    prompts = commands.add_parser("prompts", help="write the prompt files of the word lists")
    prompts.add_argument("directory", help="where train, dev and heldout.jsonl go")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that ``arguments`` (default: those of the process) name."""
    options = _parser().parse_args(arguments)
    if options.command == "pack":
        pack(options.pipeline, options.weights, options.target)
    elif options.command == "prompts":
        write_prompts(options.directory)
    else:
        build(
            options.directory,
            seed=options.seed,
            vae_steps=options.vae_steps,
            say=lambda line: print(line, flush=True),
        )


if __name__ == "__main__":
    main()
