"""`omni-server config`: show, validate and list stage configs."""

import argparse
import json

import yaml

from omni_server.config.load import find_stage_config, load_stage_config, shipped_configs


def fill(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Look at stage configs: which stages of a model run where, and what flows between them."
    )
    parser.epilog = "docs/configuration.md explains every field."
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = actions.add_parser(
        "show",
        help="check a stage config and print it with every default filled in",
        description="Check a stage config and print it with every default filled in. The output is a valid "
        "stage config itself.",
        allow_abbrev=False,
    )
    _add_file(show)
    show.add_argument("--json", action="store_true", help="print JSON instead of YAML")
    show.set_defaults(run=_show)
    validate = actions.add_parser(
        "validate",
        help="check a stage config and report its errors",
        description="Check a stage config by itself. Exit code 0 if it is valid; 2 if not: the errors go to "
        "stderr, with line and field. `omni-server check` tells whether a model fits this machine with it.",
        allow_abbrev=False,
    )
    _add_file(validate)
    validate.set_defaults(run=_validate)
    listing = actions.add_parser(
        "list",
        help="list the shipped stage configs",
        description="List the shipped stage configs: their names, which --stage-config takes, and their "
        "files.",
        allow_abbrev=False,
    )
    listing.set_defaults(run=_list)


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE",
        help=f"a YAML file, or the name of a shipped config: {', '.join(shipped_configs())}",
    )


def _show(options: argparse.Namespace) -> int:
    config = load_stage_config(find_stage_config(options.file))
    document = config.model_dump(mode="json", by_alias=True)
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        print(yaml.safe_dump(document, sort_keys=False), end="")
    return 0


def _validate(options: argparse.Namespace) -> int:
    path = find_stage_config(options.file)
    config = load_stage_config(path)
    stages = ", ".join(f"{name} ({stage.model_stage})" for name, stage in config.stages.items())
    print(f"{path} is valid: platform {config.platform}, stages {stages}")
    return 0


def _list(_: argparse.Namespace) -> int:
    configs = shipped_configs()
    width = max(map(len, configs))
    for name, path in configs.items():
        print(f"{name:{width}}  {path}")
    return 0
