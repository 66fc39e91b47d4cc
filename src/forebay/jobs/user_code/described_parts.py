"""One fingerprint of several objects that belong together, such as a model and its data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forebay.jobs.user_code.fingerprint import Fingerprint, describe


def describe_parts(parts: Mapping[str, Any]) -> Fingerprint:
    """Return the code and parameters of all parts, for change detection.

    Args:
        parts: Each by its role, which begins the names of its parameters. The first names the
            whole in messages.
    """
    code: dict[str, str] = {}
    parameters: list[tuple[str, str]] = []
    name = ""
    for role, part in parts.items():
        found = describe(part)
        name = name or found.name
        code.update(found.code)
        parameters += [(f"{role}.{key}", value) for key, value in found.parameters]
    return Fingerprint(name, None, tuple(code.items()), tuple(parameters))
