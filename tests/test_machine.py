"""What a record says of its machine: true, survives silence, and names nobody."""

import getpass
import json
import os
import platform
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from decodegap import host, machine
from decodegap.errors import StoreError
from decodegap.schema import DeviceState, Machine

UNPROBED = dict.fromkeys(
    ("before", "after", "read_gb_s", "read_kernel", "read_buffer_mib", "dispatch_us", "dispatch_us_spread")
)
STATE = "machine.state(gpus.detect()[0])"


def state(fake_nvml, *cards, **env):
    return fake_nvml.ask(f"{STATE}.model_dump()", *cards, **env)


def test_this_cpu_fills_a_record(tmp_path):
    seen = Machine(**machine.describe(None, tmp_path), **UNPROBED)
    assert seen.device_name == seen.cpu_model
    assert seen.cores == len(os.sched_getaffinity(0))
    assert seen.host_memory_mib == psutil.virtual_memory().total // 2**20
    assert machine.state(None) is None
    assert machine.energy_mj(None) is None


def test_cores_are_those_this_process_may_use(tmp_path):
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert machine.describe(None, tmp_path)["cores"] == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_card_fills_a_record(fake_nvml, h200, tmp_path):
    call = "machine.describe(gpus.detect()[0], __import__('pathlib').Path(os.environ['STORE']))"
    facts = fake_nvml.ask(call, h200(), STORE=str(tmp_path))
    seen = Machine(**facts, **UNPROBED)
    assert (seen.device_name, seen.memory_mib, seen.sm_count, seen.capability) == ("NVIDIA H200", 143771, 132, "9.0")
    assert (seen.driver, seen.cuda, seen.ecc, seen.mig, seen.persistence) == ("580.95.05", "13.1", True, False, True)
    assert (seen.power_cap_w, seen.power_cap_default_w) == (700.0, 700.0)
    assert (seen.bus_width_bits, seen.max_memory_clock_mhz) == (6016, 3201)


def test_the_state_of_a_card_is_what_it_reports(fake_nvml, h200):
    card = h200(event_reasons="0x4", sm_clock=1830, power_mw=699700, utilisation=98, ecc_uncorrected=2)
    assert state(fake_nvml, card) == {
        "sm_clock_mhz": 1830,
        "memory_clock_mhz": 3201,
        "temperature_c": 34,
        "power_w": 699.7,
        "throttle_reasons": ["software power cap"],
        "memory_used_mib": 4,
        "utilisation_percent": 98,
        "other_processes": 0,
        "ecc_uncorrected": 2,
    }


@pytest.mark.parametrize(
    ("bits", "names"),
    [
        ("0x0", []),
        ("0x1", ["idle"]),
        ("0x68", ["hardware slowdown", "software thermal slowdown", "hardware thermal slowdown"]),
        ("0x80", ["hardware power brake"]),
        ("0x1000", ["unknown reason 0x1000"]),
    ],
)
def test_event_reasons_have_readable_names(fake_nvml, h200, bits, names):
    assert state(fake_nvml, h200(event_reasons=bits))["throttle_reasons"] == names


def test_an_older_driver_gives_reasons_and_memory_under_older_names(fake_nvml, h200):
    seen = state(fake_nvml, h200(event_reasons=None, throttle_reasons="0x40", memory_v2_missing=1, reserved_mib=0))
    assert seen["throttle_reasons"] == ["hardware thermal slowdown"]
    assert seen["memory_used_mib"] == 4


def test_a_card_that_reports_next_to_nothing_gives_none_and_no_error(fake_nvml, h200, tmp_path):
    bare = {key: h200()[key] for key in ("uuid", "name", "capability")}
    assert state(fake_nvml, bare | {"processes_missing": 1}) == {
        **dict.fromkeys(DeviceState.model_fields),
        "throttle_reasons": ["not reported"],
    }
    call = "machine.describe(gpus.detect()[0], __import__('pathlib').Path(os.environ['STORE']))"
    fake_nvml.cards(bare, driver={})
    seen = Machine(**fake_nvml.ask(call, STORE=str(tmp_path)), **UNPROBED)
    assert (seen.driver, seen.cuda, seen.ecc, seen.power_cap_w, seen.sm_count) == (None,) * 5
    assert fake_nvml.ask("machine.energy_mj(gpus.detect()[0])") is None


def test_a_card_that_is_lost_while_measured_gives_none_and_no_error(fake_nvml, h200):
    fake_nvml.cards(h200())
    lost = dict.fromkeys(h200(), "lost") | {"memory_mib": 143771, "processes_missing": 1}
    code = (
        "import json, os, pathlib\nfrom decodegap import gpus, machine\n"
        "device = gpus.detect()[0]\nmachine.state(device)\n"
        f"path = pathlib.Path(os.environ['FAKE_NVML'])\npath.write_text({_text(lost)!r})\n"
        "print(json.dumps([machine.state(device).sm_clock_mhz, machine.energy_mj(device)]))\n"
    )
    done = fake_nvml.run("-c", code)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [None, None]


def _text(card):
    return "\n".join(["[gpu]", *(f"{key} = {value}" for key, value in card.items())]) + "\n"


def test_the_card_asked_about_is_the_one_chosen(fake_nvml, h200):
    fake_nvml.cards(h200(sm_clock=1000), h200(uuid="GPU-second", sm_clock=2000, energy_mj=77))
    asked = "[machine.state(d).sm_clock_mhz for d in gpus.detect()] + [machine.energy_mj(gpus.detect()[1])]"
    assert fake_nvml.ask(asked) == [1000, 2000, 77]


def test_the_state_is_quick_to_read(fake_nvml, h200):
    fake_nvml.cards(h200(process=["self 500", "1 300"]))
    timed = (
        "(lambda d, clock: (machine.state(d), clock(), machine.state(d), clock()))"
        "(gpus.detect()[0], __import__('time').perf_counter)"
    )
    _, start, _, end = fake_nvml.ask(f"[x if isinstance(x, float) else 0 for x in {timed}]")
    assert end - start < 0.02


@pytest.mark.parametrize(
    ("changes", "others"),
    [
        ({}, 0),
        ({"process": "self 500", "used_mib": 504}, 0),
        ({"process": ["{stranger} 300"], "used_mib": 304}, 1),
        ({"process": ["self 500", "{stranger} 300", "4000000 200"], "used_mib": 1004}, 2),
        ({"process": ["{parent} 300"], "used_mib": 304}, 0),
        ({"used_mib": 200}, 0),  # an idle card's own
        ({"used_mib": 201}, 1),
        ({"process": ["{stranger} 300"], "used_mib": 500}, 1),
        ({"process": ["{stranger} 300"], "used_mib": 501}, 2),
        ({"used_mib": 20000}, 1),  # nobody listed, yet the memory is taken: a container hides its owner
        ({"process": ["{stranger} 300"], "used_mib": 20000}, 2),
        ({"processes_missing": 1, "used_mib": 200}, None),
        ({"processes_missing": 1, "used_mib": 201}, 1),
        ({"processes_missing": 1, "used_mib": 20000}, 1),
    ],
)
def test_neighbours_are_counted_and_family_is_not(fake_nvml, h200, changes, others):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stranger:
        names = {"parent": os.getpid(), "stranger": stranger.pid}
        known = changes.get("process", [])
        lines = [line.format(**names) for line in ([known] if isinstance(known, str) else known)]
        assert state(fake_nvml, h200(**changes | {"process": lines}))["other_processes"] == others
        stranger.kill()


def test_a_child_of_this_process_is_no_neighbour(fake_nvml, h200):
    fake_nvml.cards(h200())
    code = (
        "import os, pathlib, subprocess, sys\nfrom decodegap import gpus, machine\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "path = pathlib.Path(os.environ['FAKE_NVML'])\n"
        "path.write_text(path.read_text() + f'process = {child.pid} 400\\nused_mib = 404\\n')\n"
        "print(machine.state(gpus.detect()[0]).other_processes)\nchild.kill()\nchild.wait()\n"
    )
    done = fake_nvml.run("-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


def test_nothing_in_a_description_names_the_host_or_its_user(fake_nvml, h200, tmp_path):
    card = h200()
    call = (
        "[machine.describe(d, __import__('pathlib').Path(os.environ['STORE'])) for d in (gpus.detect()[0], None)]"
        f" + [{STATE}.model_dump()]"
    )
    text = json.dumps(fake_nvml.ask(call, card, STORE=str(tmp_path)))
    secrets = {
        card["uuid"],
        card["uuid"].removeprefix("GPU-"),
        str(tmp_path),
        str(Path.home()),
        host._machine_id(Path("/")),
    }
    secrets |= {socket.gethostname(), platform.node()}
    addresses = {a.address for group in psutil.net_if_addrs().values() for a in group}
    for secret in (secrets | addresses) - {"", "localhost"}:
        assert secret not in text
    words = {word.lower() for word in text.replace('"', " ").split()}
    assert getpass.getuser().lower() not in words
    assert '"/' not in text


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
