"""The settings of a platform: the text between the brackets of ``"cpu[threads=1,env:MKL_CBWR=COMPATIBLE]"``.

They are parsed without torch.
"""

from __future__ import annotations

import difflib
import json
import re
from typing import TYPE_CHECKING, Any, TypeAlias

from shadowrun.errors import PlatformError
from shadowrun.platforms.backends import BACKENDS, backend_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["COMPUTE", "ENV", "PYTHON", "Setting", "environment", "needs_process", "public", "read", "write"]

Setting: TypeAlias = "bool | int | str"
Settings: TypeAlias = "tuple[tuple[str, Setting], ...]"

COMPUTE = "compute"
"""The dtype in which a comparison's operators compute on the platform, whatever that of their inputs."""
PYTHON = "python"
"""The setting that names another interpreter, with another torch."""
ENV = "env:"
"""Begins settings that are environment variables."""

_PROCESS_VARIABLES = {
    "isa": "ATEN_CPU_CAPABILITY",
    "mkl_cbwr": "MKL_CBWR",
    "mkl_isa": "MKL_ENABLE_INSTRUCTIONS",
    "onednn_isa": "ONEDNN_MAX_CPU_ISA",
}
# Settings that a process reads once, at its start, and the environment variables that they are.

_BOOLS = {"on": True, "true": True, "1": True, "yes": True, "off": False, "false": False, "0": False, "no": False}
_PRECISIONS = ("highest", "high", "medium")
_WORDS = {
    COMPUTE: ("float32", "float64"),
    "isa": ("default", "avx2", "avx512"),
    "mkl_cbwr": (
        *("AUTO", "COMPATIBLE", "SSE2", "SSE3", "SSSE3", "SSE4_1", "SSE4_2", "AVX", "AVX2", "AVX512", "AVX512_E1"),
        *("AVX2_STRICT", "AVX512_STRICT", "AVX512_E1_STRICT"),
    ),
    "mkl_isa": ("SSE4_2", "AVX", "AVX2", "AVX512", "AVX512_E1"),
    "onednn_isa": (
        *("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16"),
        *("AVX512_CORE_FP16", "AVX512_CORE_AMX", "ALL"),
    ),
    "float32_matmul_precision": _PRECISIONS,
}
_ACCEPTED = {
    COMPUTE: ", ".join(_WORDS[COMPUTE]),
    "deterministic": "on or off",
    "env:NAME": "any text",
    "float32_matmul_precision": ", ".join(_PRECISIONS),
    "flush_denormal": "on or off",
    "isa": ", ".join(_WORDS["isa"]),
    "mkl_cbwr": ", ".join(_WORDS["mkl_cbwr"]),
    "mkl_isa": ", ".join(_WORDS["mkl_isa"]),
    "mkldnn": "on or off",
    "onednn_isa": ", ".join(_WORDS["onednn_isa"]),
    "python": "the path of an interpreter or of its virtual environment",
    "tf32": "on or off",
    "threads": "a whole number from 1 to 1024",
}
# What each setting accepts; `backends` says which settings a device has.

_ITEM = re.compile(r'(?P<key>[^=,]*)(?:=\s*(?:(?P<quoted>"(?:[^"\\]|\\.)*")\s*|(?P<bare>(?:[^",\s][^,]*)?)))?(?:,|$)')
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BARE = re.compile(r"[\w./:+@%=~^-]+", re.ASCII)


def read(spec: str, device_type: str, text: str | None) -> Settings:
    """Parse the text between the brackets.

    Args:
        spec: The whole platform, for messages.
        device_type: ``cpu``; `backends` has the settings of each.
        text: ``key=value,...``; None without brackets.

    Raises:
        PlatformError: Malformed text, unknown setting, bad value, or two that contradict each other.
    """
    if text is None:
        return ()
    known = backend_of(device_type).settings
    if not known:
        having = "; ".join(f"{name} has: {', '.join(b.settings)}" for name, b in BACKENDS.items() if b.settings)
        raise PlatformError(
            f"Device {device_type!r} in platform {spec!r} has no settings; {having}.", slug="unknown-setting"
        )
    settings: dict[str, Setting] = {}
    for key, value in _items(spec, text):
        # The last of two values would win silently.
        if key in settings:
            raise PlatformError(f"Setting {key!r} is given twice in platform {spec!r}.", slug="bad-spec")
        settings[key] = _value(spec, device_type, known, key, value)
    _check_together(spec, settings)
    # Sorted, so that equal platforms have one text.
    return tuple(sorted(settings.items()))


def write(settings: Settings) -> str:
    """The canonical text, which `read` reads back."""
    return ",".join(f"{key}={_print(value)}" for key, value in settings)


def public(settings: Settings) -> Settings:
    """The settings without paths, for data files and reports, which are passed on."""
    # That of an interpreter without a slash too: a relative path names an environment of the user's.
    return tuple((key, "(a path)" if isinstance(v, str) and ("/" in v or key == PYTHON) else v) for key, v in settings)


def needs_process(settings: Settings) -> bool:
    """Whether there is a setting that a process reads once, at its start."""
    return any(key in _PROCESS_VARIABLES or key == PYTHON or key.startswith(ENV) for key, _ in settings)


def environment(settings: Settings) -> dict[str, str]:
    """The environment variables that the settings stand for."""
    found = {}
    for key, value in settings:
        if key in _PROCESS_VARIABLES:
            # MKL's own value has a comma, which separates settings here.
            found[_PROCESS_VARIABLES[key]] = str(value).replace("_STRICT", ",STRICT")
        elif key == "threads":
            # A worker reads its pool's size at its start.
            found["OMP_NUM_THREADS"] = found["MKL_NUM_THREADS"] = str(value)
        elif key.startswith(ENV):
            found[key.removeprefix(ENV)] = str(value)
    return found


def _items(spec: str, text: str) -> Iterator[tuple[str, str]]:
    """Keys and values; a value in double quotes is a JSON string, and may have commas."""
    position, more = 0, True
    while more:
        match = _ITEM.match(text, position)
        key = match["key"].strip() if match is not None else ""
        if match is None or not key or (match["quoted"] is None and match["bare"] is None):
            item = text[position:].strip() if match is None else match[0].rstrip(",").strip()
            raise PlatformError(
                f"Setting {item!r} in platform {spec!r} cannot be read: write key=value. A value with commas goes "
                f'in quotes, as in JSON: key="a,b". Settings of cpu: {", ".join(BACKENDS["cpu"].settings)}.',
                slug="bad-spec",
            )
        yield key, (match["bare"] or "").strip() if match["quoted"] is None else _unquoted(spec, match["quoted"])
        position, more = match.end(), match[0].endswith(",")


def _unquoted(spec: str, quoted: str) -> str:
    try:
        return str(json.loads(quoted))
    except ValueError as error:
        raise PlatformError(
            f"{quoted} in platform {spec!r} is no JSON string: {error}. A backslash is written twice.", slug="bad-spec"
        ) from None


def _value(spec: str, device_type: str, known: tuple[str, ...], key: str, text: str) -> Setting:
    own = {setting.name: setting.values for setting in backend_of(device_type).own_settings}
    if key in own:
        accepted = dict(zip(own[key], own[key], strict=True)) or _BOOLS
        if text in accepted:
            return accepted[text]
        use = ", ".join(own[key]) or "on or off"
        raise PlatformError(f"{key}={text!r} in platform {spec!r} cannot be used: give {use}.", slug="bad-setting")
    if key.startswith(ENV) and f"{ENV}NAME" in known:
        return _variable(spec, key, text)
    if key not in known:
        near = difflib.get_close_matches(key.lower(), known, 1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise PlatformError(
            f"Unknown setting {key!r} in platform {spec!r}.{hint} Settings of {device_type}: {', '.join(known)}.",
            slug="unknown-setting",
        )
    if key == "threads":
        # `isdecimal` alone is true of the digits of other scripts, too.
        if text.isdecimal() and text.isascii() and len(text) < 9 and 1 <= int(text) <= 1024:
            return int(text)
    elif key == PYTHON:
        if _is_sendable(text) and text:
            return text
    elif key in _WORDS:
        # The vendor's spelling is stored: two spellings would be two platforms.
        for word in _WORDS[key]:
            if text.lower() == word.lower():
                return word
    elif text.lower() in _BOOLS:
        return _BOOLS[text.lower()]
    raise PlatformError(
        f"{key}={text!r} in platform {spec!r} cannot be used: give {_ACCEPTED[key]}.",
        slug="bad-setting",
    )


def _variable(spec: str, key: str, text: str) -> str:
    name = key.removeprefix(ENV)
    if not _VARIABLE.fullmatch(name):
        raise PlatformError(
            f"{name!r} in platform {spec!r} is no name of an environment variable: write env:NAME=value.",
            slug="bad-setting",
        )
    if not _is_sendable(text):
        raise PlatformError(
            f"{key}={text!r} in platform {spec!r} cannot be the value of an environment variable.", slug="bad-setting"
        )
    return text


def _is_sendable(text: str) -> bool:
    """Whether a process can be given this text, and a data file can keep it."""
    try:
        return "\0" not in text and bool(text.encode("utf-8") or True)
    except UnicodeEncodeError:
        return False


def _check_together(spec: str, settings: dict[str, Setting]) -> None:
    if settings.get("flush_denormal") is True and int(settings.get("threads", 1)) > 1:
        # torch sets the mode on the calling thread only: what the other threads compute would not be flushed.
        raise PlatformError(
            f"Platform {spec!r}: flush_denormal=on reaches one thread only, so it runs with threads=1; "
            f"remove threads={settings['threads']}.",
            slug="bad-setting",
        )
    if COMPUTE in settings and needs_process(tuple(settings.items())):
        raise PlatformError(
            f"Platform {spec!r}: operators compute in another dtype in this process only; give compute= alone, or with "
            "settings that need no process of their own.",
            slug="bad-setting",
        )
    for key, value in settings.items():
        # `isa=` and `env:ATEN_CPU_CAPABILITY=` would contradict each other unnoticed.
        for name in environment(((key, value),)):
            if key != f"{ENV}{name}" and f"{ENV}{name}" in settings:
                raise PlatformError(
                    f"Platform {spec!r} sets {name} twice: {key} is the same as env:{name}.", slug="bad-setting"
                )


def _print(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)
