"""Names of a stage's replicas, in errors, logs, metrics and commands: `talker/1`, or `talker` if it has no
others."""


def replica_names(stage: str, replicas: int) -> tuple[str, ...]:
    """The names of all replicas, which are numbered from 0."""
    return (stage,) if replicas == 1 else tuple(f"{stage}/{number}" for number in range(replicas))


def split_replica_name(name: str) -> tuple[str, str | None]:
    """The stage, and the replica's number, or None if the stage has one replica."""
    stage, _, number = name.partition("/")
    return stage, number or None
