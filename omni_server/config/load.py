"""From a YAML file to a `StageConfig`, with errors that name the file, the field and what to change."""

import re
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from reprlib import Repr

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from omni_server.config.stage_config import StageConfig
from omni_server.errors import ConfigError

Location = tuple[int | str, ...]

_NAME = re.compile(r"\w+")
_PATH = re.compile(r"\w+(\.\w+|\[\d+\])*")
_short = Repr()  # nested aliases can expand a page of YAML to gigabytes
_short.maxstring = _short.maxlong = _short.maxother = 100
_short.maxlevel = 2


def load_stage_config(path: Path) -> StageConfig:
    """Read and check a stage config.

    Raises `ConfigError` if the file cannot be read, is not YAML, or is not a valid stage config.
    """
    text = _read_text(path)
    document = _parsed(path, text)
    if not isinstance(document, dict):
        found = "nothing" if document is None else f"a {type(document).__name__}"
        raise ConfigError(
            f"{path}: a stage config is a mapping with the keys model_family, platform, stages and edges; "
            f"found {found}"
        )
    try:
        return StageConfig.model_validate(document)
    except ValidationError as error:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        problems = [(details["loc"], _describe(details)) for details in error.errors(include_url=False)]
        lines = [
            f"{path}: {_line_of(location or _named_first(problem), root)}{problem}"
            for location, problem in problems
        ]
        raise ConfigError("\n".join(lines)) from error


def find_stage_config(name_or_path: str) -> Path:
    """The file that `--stage-config` means: a path, else the name of a shipped config. Raises
    `ConfigError`."""
    path = Path(name_or_path)
    if path.exists() or len(path.parts) != 1:
        return path
    return find_shipped_config(name_or_path)


def find_shipped_config(name: str) -> Path:
    """The shipped config called `name`, with or without `.yaml`. Raises `ConfigError`."""
    configs = shipped_configs()
    wanted = name.removesuffix(".yaml")
    if wanted not in configs:
        close = get_close_matches(wanted, configs, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"shipped are {', '.join(configs)}"
        raise ConfigError(f"'{name}' is neither a file nor a shipped stage config; {hint}")
    return configs[wanted]


def shipped_configs() -> dict[str, Path]:
    """The stage configs that come with the package, by their names without `.yaml`."""
    package = Path(str(resources.files("omni_server")))
    folder = package / "configs"
    if not folder.is_dir():
        # A checkout: there the folder stands at the top level; setup.py moves it into the wheel.
        folder = package.parent / "configs"
    return {file.name.removesuffix(".yaml"): file for file in sorted(folder.glob("*.yaml"))}


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that reads every key as text, because a name may look like a number or be `on` or `no`. It
    rejects duplicate keys, of which PyYAML itself silently keeps the last one, and reports the position of
    every value that does not have its tag's type."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> object:
        try:
            value: object = super().construct_object(node, deep)
        # of 2026-13-01, `!!int ""`, `!!timestamp x`
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise yaml.constructor.ConstructorError(
                problem=f"a value that is no {node.tag.rpartition(':')[2]}", problem_mark=node.start_mark
            ) from error
        return value

    def compose_mapping_node(self, anchor: dict[str, yaml.Node]) -> yaml.MappingNode:
        """Keys that it merges (`<<`) have not joined the mapping's own yet. `anchor` is a name or None; its
        type is that of PyYAML's stubs."""
        node = super().compose_mapping_node(anchor)
        first_seen: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in first_seen:
                raise yaml.constructor.ConstructorError(
                    problem=(
                        f"the key '{key.value}' stands here again; first on line "
                        f"{first_seen[key.value].line + 1}"
                    ),
                    problem_mark=key.start_mark,
                )
            first_seen[key.value] = key.start_mark
        node.value = [(_as_text(key), value) for key, value in node.value]
        return node


def _as_text(key: yaml.Node) -> yaml.Node:
    if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
        return key
    return yaml.ScalarNode("tag:yaml.org,2002:str", key.value, key.start_mark, key.end_mark)


def _named_first(problem: str) -> Location:
    """The field with which a message about the whole file begins, as in `edges[0].to is ...`."""
    path = _PATH.match(problem)
    names = [] if path is None else _NAME.findall(path[0])
    return tuple(int(name) if name.isdecimal() else name for name in names)


def _line_of(location: Location, root: yaml.Node | None) -> str:
    """`line 12: ` for the position of pydantic's `location` in the YAML, or of the nearest enclosing one; ""
    for the whole file. Items that pydantic inserts between keys are in no mapping and are skipped."""
    node = root
    line: int | None = None
    for item in location:
        if isinstance(node, yaml.MappingNode):
            found = next(((key, value) for key, value in node.value if key.value == str(item)), None)
            if found is not None:
                line, node = found[0].start_mark.line, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(item, int):
            node = node.value[item]
            line = node.start_mark.line
    return "" if line is None else f"line {line + 1}: "


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        shipped = ", ".join(shipped_configs())
        raise ConfigError(
            f"{path}: no such file; give a path or the name of a shipped config ({shipped})"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not a text file in UTF-8 ({error.reason} at byte {error.start})"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _parsed(path: Path, text: str) -> object:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = "; ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{path}: {where}{problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: lists and mappings are nested too deeply") from error


def _describe(details: ErrorDetails) -> str:
    """The field, the problem and a hint: `stages.talker.max_num_seq: unknown key; did you mean
    'max_num_seqs'?`"""
    location = details["loc"]
    path = _path(location)
    match details["type"]:
        case "unknown_key":
            return f"{path}: {details['msg']}"
        case "missing":
            return f"{path}: missing"
        case "value_error":
            message = details["msg"].removeprefix("Value error, ")
            return f"{path}: {message}" if path else message
        case "union_tag_not_found":
            return f"{path}.engine: missing; write 'engine: ar' or 'engine: diffusion'"
        case "union_tag_invalid":
            tag = details["ctx"]["tag"]
            return f"{path}.engine: must be 'ar' or 'diffusion', not '{tag}'"
        case "string_pattern_mismatch" if location[-1] == "[key]":
            return (
                f"{path}: a stage's name is lower-case letters, digits and underscores, and begins with a "
                "letter"
            )
        case "string_pattern_mismatch":
            return f"{path}: must look like 'package.module:name', not {_short.repr(details['input'])}"
        case "literal_error":
            expected, found = details["ctx"]["expected"], _short.repr(details["input"])
            return f"{path}: must be {expected}, not {found}{_choice_hint(details)}"
        case _:
            message = details["msg"].replace("Input should be", "must be", 1)
            return f"{path}: {message}, not {_short.repr(details['input'])}"


def _path(location: Location) -> str:
    """`stages.talker.devices[1]`, without the engine that pydantic inserts after the name of a stage."""
    path = ""
    for place, item in enumerate(location):
        if item == "[key]" or (location[0] == "stages" and place == 2 and item in ("ar", "diffusion")):
            continue
        path += f"[{item}]" if isinstance(item, int) else f".{item}"
    return path.removeprefix(".")


def _choice_hint(details: ErrorDetails) -> str:
    choices = details["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
    close = get_close_matches(details["input"], choices, n=1) if isinstance(details["input"], str) else []
    return f"; did you mean '{close[0]}'?" if close else ""
