"""`omni-server config show`: a stage config as the server understands it."""

import argparse
import json

import yaml

from omni_server.config.load import find_stage_config, load_stage_config, shipped_configs


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `config` with its sub-commands."""
    description = "Look at stage configs."
    parser = commands.add_parser("config", help="check and show a stage config", description=description)
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    show = actions.add_parser(
        "show",
        help="check a stage config and print it with every default filled in",
        description="Check a stage config and print it with every default filled in. What is printed is a valid "
        "stage config itself.",
        allow_abbrev=False,
    )
    show.add_argument(
        "file", metavar="FILE", help=f"a YAML file, or the name of a shipped config: {', '.join(shipped_configs())}"
    )
    show.add_argument("--json", action="store_true", help="print JSON instead of YAML")
    show.set_defaults(run=_show)


def _show(options: argparse.Namespace) -> int:
    config = load_stage_config(find_stage_config(options.file))
    document = config.model_dump(mode="json", by_alias=True)
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        print(yaml.safe_dump(document, sort_keys=False), end="")
    return 0
