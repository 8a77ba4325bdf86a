"""Lists the packages; everything else about the project is in pyproject.toml.

`configs/` stands at the top level of the repository and travels in the wheel as `omni_server/configs`,
which a static table in pyproject.toml cannot say together with package discovery.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["omni_server*", "stages*"]), "omni_server.configs"],
    package_dir={"omni_server.configs": "configs"},
    package_data={
        "omni_server.platform": ["json_logging.json"],
        "omni_server.configs": ["*.yaml"],
        "omni_server.api.web": ["static/*", "docs/*"],
        "omni_server.engine": ["empty_generation_config/*.json"],
        "stages.qwen2_5_omni": ["speaking_demo/*"],
    },
)
