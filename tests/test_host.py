"""What the computer around the device is, as its system files say, and a tag that tells hosts apart."""

import os
import stat
import subprocess
import sys

import pytest

from decodegap import host, machine
from decodegap.errors import StoreError


def test_cores_are_those_this_process_may_use(tmp_path):
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert machine.describe(None, tmp_path)["cores"] == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_the_tag_tells_hosts_apart_and_stays_the_same(tmp_path):
    tag = host.tag("GPU-aaaa", tmp_path)
    assert len(tag) == 8
    assert int(tag, 16) >= 0
    assert host.tag("GPU-aaaa", tmp_path) == tag
    assert host.tag("GPU-bbbb", tmp_path) != tag
    assert host.tag("", tmp_path) != tag
    assert host.tag("GPU-aaaa", tmp_path / "another store") != tag


def test_the_salt_is_secret_and_made_once_by_many(tmp_path):
    code = "import sys, pathlib; from decodegap import host; print(host.tag('card', pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, env=path, text=True) for _ in range(8)]
    assert len({process.communicate()[0] for process in started}) == 1
    salt = tmp_path / host.SALT_FILE
    assert [path.name for path in tmp_path.iterdir()] == [salt.name]
    assert stat.S_IMODE(salt.stat().st_mode) == 0o600
    assert len(salt.read_bytes()) == 32


def test_of_two_salts_made_at_once_the_first_stays(tmp_path):
    (tmp_path / "first").write_bytes(b"1")
    (tmp_path / "second").write_bytes(b"2")
    host._link(tmp_path / "second", tmp_path / "first")
    assert (tmp_path / "first").read_bytes() == b"1"


def test_a_damaged_salt_or_an_unwritable_store_is_one_clear_line(tmp_path):
    (tmp_path / host.SALT_FILE).write_bytes(b"short")
    with pytest.raises(StoreError, match="holds 5 bytes instead of 32; delete it"):
        host.tag("card", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot keep the host tag's salt"):
        host.tag("card", tmp_path / "file")


def lay_out(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/pod/one",
                "sys/fs/cgroup/pod/cpu.max": "400000 100000",
                "sys/fs/cgroup/pod/one/cpu.max": "800000 100000",
            },
            4.0,
        ),
        (
            {
                "proc/self/cgroup": "12:memory:/x\n3:cpu,cpuacct:/docker/abc\n0::/",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            2.5,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
    ],
)
def test_the_tightest_cpu_quota_is_found_in_either_hierarchy(tmp_path, files, cores):
    assert host.cpu_quota_cores(lay_out(tmp_path, files)) == cores


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({}, None),
        ({"proc/1/cgroup": "0::/init.scope"}, None),
        ({".dockerenv": ""}, "docker"),
        ({"run/.containerenv": 'name="someone\'s"'}, "podman"),
        ({"proc/1/cgroup": "1:cpu:/kubepods/burstable/pod1234", ".dockerenv": ""}, "kubernetes"),
        ({"proc/1/cgroup": "1:cpu:/docker/0123abcd"}, "docker"),
    ],
)
def test_a_container_is_hinted_at_by_kind_only(tmp_path, files, kind):
    assert host.container(lay_out(tmp_path, files)) == kind


def cache_files(cpu, *caches):
    base = f"sys/devices/system/cpu/cpu{cpu}/cache"
    return {
        f"{base}/index{i}/{name}": text
        for i, (level, kind, size, shared) in enumerate(caches)
        for name, text in {"level": level, "type": kind, "size": size, "shared_cpu_list": shared}.items()
    }


def test_the_last_level_cache_counts_each_instance_once(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "usable_cores", lambda: [0, 1, 2])
    shared, own = ("3", "Unified", "32768K", "0-1"), ("3", "Unified", "32768K", "2-3")
    small = ("1", "Data", "48K", "0")
    files = cache_files(0, small, shared) | cache_files(1, small, shared) | cache_files(2, small, own)
    assert host.last_level_cache_mib(lay_out(tmp_path, files)) == 64.0
    assert host.last_level_cache_mib(tmp_path / "nothing") is None


def test_governor_and_cpu_model_come_from_the_system_files(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "usable_cores", lambda: [0, 1])
    files = {
        f"sys/devices/system/cpu/cpu{n}/cpufreq/scaling_governor": name
        for n, name in enumerate(("powersave", "performance"))
    }
    root = lay_out(tmp_path, files | {"proc/cpuinfo": "processor : 0\nmodel name\t: Some  CPU @ 2 GHz\n"})
    assert host.governor(root) == "performance/powersave"
    assert host.cpu_model(root) == "Some CPU @ 2 GHz"
    assert host.governor(tmp_path / "nothing") is None
    assert host.cpu_model(tmp_path / "nothing")
