"""What the computer around the device is, asked of /proc and /sys; nothing here names it.

Functions that read the system take its root, so that a test can lay out another machine's files.
"""

import contextlib
import hashlib
import hmac
import os
import platform
import resource
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from decodegap.errors import StoreError

ROOT = Path("/")
SALT_FILE = ".host-salt"
SALT_BYTES = 32
TAG_DIGITS = 8


def facts() -> dict[str, Any]:
    """The fields of `schema.Machine` that are about the host, by name."""
    return {
        "cpu_model": cpu_model(),
        "cores": len(usable_cores()),
        "host_memory_mib": psutil.virtual_memory().total // 2**20,
        "last_level_cache_mib": last_level_cache_mib(),
        "governor": governor(),
        "load_1min": round(os.getloadavg()[0], 2),
        "cpu_quota_cores": cpu_quota_cores(),
        "container": container(),
    }


def tag(card: str, store: Path) -> str:
    """Eight hex digits that tell hosts (and cards) apart and identify none.

    HMAC-SHA256 of the machine id and `card` (its UUID, empty for a CPU) under a random salt that never leaves
    `store`, so that nobody can test a guess. Stable over reboots. Raises `StoreError`.
    """
    identity = "\n".join([_machine_id(ROOT), card, cpu_model()])
    return hmac.new(_salt(store / SALT_FILE), identity.encode(), hashlib.sha256).hexdigest()[:TAG_DIGITS]


def cpu_model(root: Path = ROOT) -> str:
    """What the processor calls itself."""
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return " ".join(value.split())
    return platform.machine() or "unknown"


def usable_cores() -> list[int]:
    """The cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def last_level_cache_mib(root: Path = ROOT) -> float | None:
    """Size in MiB of the highest-level cache that the usable cores can fill, its instances added up.

    A virtual machine shows its host's cache, of which it may get a part only.
    """
    instances: dict[tuple[int, str], float] = {}
    for cpu in usable_cores():
        for index in (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
            level, size = _read(index / "level"), _read(index / "size")
            if level and size and size.endswith("K") and _read(index / "type") != "Instruction":
                shared = _read(index / "shared_cpu_list") or str(cpu)
                instances[int(level), shared] = int(size[:-1]) / 1024
    highest = max((level for level, _ in instances), default=0)
    return sum(mib for (level, _), mib in instances.items() if level == highest) or None


def governor(root: Path = ROOT) -> str | None:
    """The frequency governor of the usable cores (all of them, if they differ); None where none is visible."""
    files = (root / f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor" for cpu in usable_cores())
    return "/".join(sorted({text for path in files if (text := _read(path))})) or None


def cpu_quota_cores(root: Path = ROOT) -> float | None:
    """How many cores' worth of time this process's cgroup (v2 or v1) grants, the tightest level; None: no quota."""
    quotas = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for folder in _upwards(root / "sys/fs/cgroup", path):
                quota, _, period = (_read(folder / "cpu.max") or "max").partition(" ")
                quotas.append(_cores(quota, period))
        elif "cpu" in controllers.split(","):
            for folder in _upwards(root / "sys/fs/cgroup" / controllers, path):
                limit, slice_us = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
                quotas.append(_cores(limit or "", slice_us or ""))
    return min((cores for cores in quotas if cores), default=None)


def container(root: Path = ROOT) -> str | None:
    """The kind of container this runs in, never its name; None without a hint of one."""
    groups = _read(root / "proc/1/cgroup") or ""
    hints = {
        "kubernetes": "kubepods" in groups or (root / "var/run/secrets/kubernetes.io").exists(),
        "podman": "libpod" in groups or (root / "run/.containerenv").exists(),
        "docker": "docker" in groups or (root / ".dockerenv").exists(),
        "apptainer": (root / ".singularity.d").exists(),
        "lxc": "lxc" in groups,
    }
    return next((kind for kind, seen in hints.items() if seen), None)


def peak_rss_bytes() -> int:
    """The most host memory this process has held so far (bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def _machine_id(root: Path) -> str:
    return _read(root / "etc/machine-id") or _read(root / "var/lib/dbus/machine-id") or ""


def _salt(path: Path) -> bytes:
    """The salt in `path`, made there once; of two processes that make it at once, one wins and both use its salt."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as handle:
                handle.write(secrets.token_bytes(SALT_BYTES))
            _link(fresh, path)
        salt = path.read_bytes()
    except OSError as error:
        raise StoreError(
            f"{path.parent}: cannot keep the host tag's salt: {error.strerror}; free space or rights?"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()
    if len(salt) != SALT_BYTES:
        raise StoreError(f"{path}: holds {len(salt)} bytes instead of {SALT_BYTES}; delete it, another is made")
    return salt


def _link(fresh: Path, path: Path) -> None:
    try:
        path.hardlink_to(fresh)
    except FileExistsError:
        return  # another process was first
    except OSError:
        fresh.replace(path)  # a file system without hard links


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The cgroup's folder below `mount` and every one above it, as far as this namespace shows them."""
    here = mount / path.lstrip("/")
    yield from (folder for folder in (here, *here.parents) if folder.is_relative_to(mount))


def _cores(quota: str, period: str) -> float | None:
    if not quota.isdigit() or not period.isdigit() or not int(period):
        return None  # "max", "-1" or nothing: no quota
    return int(quota) / int(period)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
