"""Hook of mkdocs.yml: the pages of the web site have the same paths as in the repository.

Pages link to other files of the repository (`../README.md`, `../configs/x.yaml`), which works on GitHub.
mkdocs expects all pages below one folder that does not contain mkdocs.yml. This hook passes it each file
under its path in the repository instead, so that mkdocs checks the same links.
"""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = (
    "*.md",
    "docs/**/*.md",
    "docs/pictures/*",
    "docs/samples/*",
    "benchmarks/*.md",
    "benchmarks/pictures/*",
    "stages/*/speaking_demo/README.md",
    # Other files that pages link to.
    "configs/*.yaml",
    "Dockerfile",
    "LICENSE",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files that mkdocs has found in `docs_dir` by the repository's files in `PATTERNS`."""
    for file in [*files.documentation_pages(), *files.media_files()]:
        if file.abs_src_path is not None and Path(file.abs_src_path).is_relative_to(config.docs_dir):
            files.remove(file)
    for pattern in PATTERNS:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files
