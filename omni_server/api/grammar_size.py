"""How much a request may say about what the text must look like."""

from omni_server.errors import InvalidRequestError

MAX_GRAMMAR_BYTES = 256 * 1024
"""A grammar is made of it, several times as large, in a time that grows with its length."""


def check_grammar_size(*texts: str, param: str) -> None:
    """Schemas, grammars or definitions that are made one grammar. Raises `InvalidRequestError`."""
    if sum(len(text.encode(errors="surrogatepass")) for text in texts) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"Invalid '{param}': at most {MAX_GRAMMAR_BYTES // 1024} KiB are allowed.",
            param=param,
            code="value_above_max_size",
        )
