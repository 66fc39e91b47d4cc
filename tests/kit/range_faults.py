"""Which answers of the range server are late, slow, broken or refused: pure, and the same by seed.

A draw is made of the seed, the key, the range and how often that range was asked for before, not
of the order of arrival: two runs that ask for the same ranges meet the same faults.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

KINDS = {
    "slowdown": "503 SlowDown",
    "error": "500 InternalError",
    "expired": "403 ExpiredToken",
    "denied": "403 AccessDenied",
    "missing": "404 NoSuchKey",
    "rewritten": "another ETag than the file has: 412 for If-Match",
    "reset": "the connection is reset (RST) in the middle of the body",
    "cut": "the connection is closed (FIN) in the middle of the body",
    "short": "a part of the body, with a Content-Length that agrees with it",
    "flip": "one bit of the body is flipped",
    "stall": "nothing is sent for `seconds` in the middle of the body, then the rest",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and which requests it meets; the first one that meets a request is injected.

    Attributes:
        kind: One of `KINDS`.
        share: Share of the requests that match all the rest, drawn by seed.
        keys: Pattern of "bucket/key", with `*` and `?`; a listing has the name of its bucket.
        methods: HTTP methods; those that are not GET meet no fault of a body but a reset.
        token: Pattern of the session token or, without one, of the access key ID; "" is none.
        skip: So many matching requests pass first.
        count: It is injected at most so often; None for ever.
        begin_s: Seconds after it was set; before that, it meets nothing.
        end_s: The same for its end; None for never.
        seconds: How long a stall lasts.
        at: Share of the body that is sent before a reset, cut or stall, or at all if it is short.
    """

    kind: str
    share: float = 1.0
    keys: str = "*/*"
    methods: tuple[str, ...] = ("GET",)
    token: str = "*"
    skip: int = 0
    count: int | None = None
    begin_s: float = 0.0
    end_s: float | None = None
    seconds: float = 1.0
    at: float = 0.5

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no fault {self.kind!r}; there are {', '.join(KINDS)}")


@dataclass(frozen=True, slots=True)
class Settings:
    """How the server behaves.

    Attributes:
        seed: Of all draws.
        first_byte_s: Median seconds until the first byte of an answer about an object.
        spread: Standard deviation of its logarithm: 0 is none, 0.3 is usual.
        slow_share: Share of answers that take `slow_factor` times as long until their first byte.
        slow_factor: See above.
        rate: Bytes per second of a connection; None for no limit.
        link: Bytes per second of all connections together; None for no limit.
        requests_per_s: Above it, a request is answered with 503 SlowDown; None for no limit.
        faults: In the order in which they are looked at.
    """

    seed: int = 0
    first_byte_s: float = 0.0
    spread: float = 0.0
    slow_share: float = 0.0
    slow_factor: float = 1.0
    rate: float | None = None
    link: float | None = None
    requests_per_s: float | None = None
    faults: tuple[Fault, ...] = ()

    @classmethod
    def of(cls, found: dict[str, Any]) -> Settings:
        """Return the settings in a JSON object."""
        faults = tuple(
            Fault(**each | {"methods": tuple(each.get("methods", ("GET",)))})
            for each in found.get("faults", ())
        )
        return cls(**found | {"faults": faults})


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, as far as draws depend on it.

    Attributes:
        method: HTTP method.
        name: "bucket/key".
        span: The range asked for.
        before: How often the same was asked for before.
        token: The session token or access key ID it was signed with; "" if it was not signed.
    """

    method: str
    name: str
    span: str
    before: int
    token: str


@dataclass(slots=True)
class Script:
    """Settings, and how far their sequences have come.

    Attributes:
        settings: What was set.
        set_at: When, in seconds of any clock that only grows.
    """

    settings: Settings
    set_at: float
    _seen: dict[int, int] = field(default_factory=dict)
    _done: dict[int, int] = field(default_factory=dict)
    _allowed_at: float = -math.inf

    def draw(self, what: str, asked: Asked) -> float:
        """Return a number from 0 to 1 that depends on the seed, on `what` and on the request."""
        named = (
            f"{self.settings.seed} {what} {asked.method} {asked.name} {asked.span} {asked.before}"
        )
        digest = hashlib.blake2b(named.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") / 2**64

    def fault(self, asked: Asked, now: float) -> Fault | None:
        """Return the fault that a request meets, and count it."""
        for number, fault in enumerate(self.settings.faults):
            if not self._matches(fault, asked, now - self.set_at):
                continue
            seen = self._seen.get(number, 0)
            self._seen[number] = seen + 1
            done = self._done.get(number, 0)
            if seen < fault.skip or (fault.count is not None and done >= fault.count):
                continue
            if fault.share >= 1 or self.draw(f"fault {number}", asked) < fault.share:
                self._done[number] = done + 1
                return fault
        return None

    def delay_s(self, asked: Asked) -> float:
        """Return the seconds until the first byte."""
        settings = self.settings
        if not settings.first_byte_s:
            return 0.0
        seconds = settings.first_byte_s
        if settings.spread:
            # Box and Muller, 1958: a normal number of two even ones.
            even, turn = 1 - self.draw("even", asked), self.draw("turn", asked)
            normal = math.sqrt(-2 * math.log(even)) * math.cos(2 * math.pi * turn)
            seconds *= math.exp(settings.spread * normal)
        slow = settings.slow_share and self.draw("slow", asked) < settings.slow_share
        return seconds * settings.slow_factor if slow else seconds

    def throttled(self, now: float) -> bool:
        """Return whether a request comes above `requests_per_s`, a tenth of a second at once."""
        rate = self.settings.requests_per_s
        if rate is None:
            return False
        allowed_at = max(self._allowed_at, now - 0.1)
        if allowed_at > now:
            return True
        self._allowed_at = allowed_at + 1 / rate
        return False

    @staticmethod
    def _matches(fault: Fault, asked: Asked, after_s: float) -> bool:
        return (
            asked.method in fault.methods
            and fault.begin_s <= after_s
            and (fault.end_s is None or after_s < fault.end_s)
            and fnmatchcase(asked.name, fault.keys)
            and fnmatchcase(asked.token, fault.token)
        )
